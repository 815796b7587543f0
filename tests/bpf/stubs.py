"""Files that look like the marker's, made by the C compiler for one test."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("marker_stub.c")


def stub(folder: Path, *flags: str, name: str = "_marker_stub.so") -> Path:
    """Compile ``marker_stub.c`` to ``folder/whyspan_inproc/name`` and return its path."""
    path = folder / "whyspan_inproc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", *flags, "-o", str(path), str(SOURCE)], check=True)
    return path
