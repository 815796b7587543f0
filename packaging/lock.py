#!/usr/bin/env python3
"""Write packaging/locks/*.txt: the exact version and hashes of whatever goes into a package.

Needs `uv` (PyPI). ``python packaging/lock.py [--upgrade]``; without, versions stay that still fit pyproject.toml.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "packaging/locks"
HEADER = "# Made by packaging/lock.py: edit {source} and run it again.\n"
#: Needed by pylibbpf's compiler only, which whyspan never imports; 170 MB.
LEFT_OUT = ("llvmlite",)


def lock(source: str, name: str, arguments: list[str]) -> None:
    """Resolve *source* (a path below the root) for every supported Python and architecture into *name*.

    Raises:
        subprocess.CalledProcessError: nothing fits, or there is no index.
    """
    target = LOCKS / name
    options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]
    for left_out in LEFT_OUT:
        options += ["--no-emit-package", left_out]
    subprocess.run(
        ["uv", "pip", "compile", "--quiet", source, "-o", str(target), *options, *arguments],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    target.write_text(HEADER.format(source=source) + target.read_text())


def main() -> int:
    """Lock what whyspan needs, and what builds it."""
    lock("pyproject.toml", "whyspan.txt", sys.argv[1:])
    lock("packaging/locks/build.in", "build.txt", sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
