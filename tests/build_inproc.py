"""Build the marker in place: ``python -m tests.build_inproc [FOLDER]``.

The compiler is called directly, so that a development tree and the tests need neither setuptools nor an
installation of ``whyspan_inproc``; ``probes/whyspan_inproc/setup.py`` builds the same file for a wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "probes/whyspan_inproc/whyspan_inproc/_marker.c"
NAME = "_marker.abi3.so"
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def build(folder: Path = SOURCE.parent) -> Path:
    """Compile the extension into ``folder`` unless it is newer than its source; return its path.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    target = folder / NAME
    if target.exists() and target.stat().st_mtime > SOURCE.stat().st_mtime:
        return target
    made = folder / f".{NAME}.{os.getpid()}"
    include = sysconfig.get_paths()["include"]
    subprocess.run(
        ["cc", *FLAGS, "-DPy_LIMITED_API=0x03090000", f"-I{include}", "-o", str(made), str(SOURCE)],
        check=True,
    )
    made.replace(target)  # whole or not at all: another process may be importing it
    return target


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:2])))
