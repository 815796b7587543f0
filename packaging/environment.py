"""Make the package's private Python environment: what the lock names, whyspan, and nothing else."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from common import LOCKS, PREFIX, BuildError
from wheels import pip

#: Tests of the libraries, and what of numpy is for building: modules that only cost room and the time to compile them.
_NOT_NEEDED = ("**/tests", "numpy/f2py", "numpy/distutils", "numpy/_pyinstaller", "numpy/_core/*_tests.*.so")
_STARTER = """\
#!/usr/lib/whyspan/bin/python -I
from whyspan.cli import main

main()
"""


def wheelhouse() -> Path:
    """Return the folder where downloaded wheels are kept between builds, for this Python."""
    cache = os.environ.get("WHYSPAN_CACHE") or Path.home() / ".cache/whyspan"
    return Path(cache) / f"wheels-{sys.version_info[0]}.{sys.version_info[1]}"


def make(python: Path, whyspan: Path, tree: Path) -> Path:
    """Install the locked wheels and *whyspan* below *tree*; return the folder of the modules.

    Raises:
        BuildError: a wheel cannot be had or has another hash.
    """
    kept, lock = wheelhouse(), LOCKS / "whyspan.txt"
    kept.mkdir(parents=True, exist_ok=True)
    locked: list[str | Path] = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "-r", lock]
    offline: list[str | Path] = ["--no-index", "--find-links", kept]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    modules = tree / PREFIX / "lib" / version / "site-packages"
    common: list[str | Path] = ["install", "--no-compile", "--target", modules]
    try:
        pip(python, *common, *offline, *locked)
    except BuildError:
        shutil.rmtree(modules, ignore_errors=True)
        pip(python, "download", "-d", kept, *locked)
        pip(python, *common, *offline, *locked)
    pip(python, *common, "--no-deps", "--no-index", whyspan)
    _tidy(modules)
    _interpreter(tree / PREFIX, version)
    return modules


def _tidy(modules: Path) -> None:
    # Programs of libraries are not for here. RECORD and its like are for pip, which must not touch a package's files;
    # they also say where the wheel lay.
    shutil.rmtree(modules / "bin", ignore_errors=True)
    for info in modules.glob("*.dist-info"):
        for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
            (info / name).unlink(missing_ok=True)
    for path in modules.rglob("*"):
        if path.is_file():  # some wheels mark all their files as programs
            path.chmod(0o644)
    for pattern in _NOT_NEEDED:
        for found in list(modules.glob(pattern)):
            if found.is_dir():
                shutil.rmtree(found)
            else:
                found.unlink(missing_ok=True)  # may have been within another


def _interpreter(prefix: Path, version: str) -> None:
    # What `python -m venv --system-site-packages` makes, without its copies of activation scripts and the path of the
    # folder it was made in. Exactly this minor version: compiled modules fit no other.
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python").symlink_to(f"../../../bin/{version}")
    starter = prefix / "bin/whyspan"
    starter.write_text(_STARTER)
    starter.chmod(0o755)
    (prefix / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = true\nversion = {sys.version_info[0]}.{sys.version_info[1]}\n"
    )
