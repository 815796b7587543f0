"""What the guest is given on its second disk: two versions of the package, and the demo's server with its client."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from tests.demo.procs import ROOT

#: The demo's own files; the client needs only the standard library.
_DEMO = (
    "tests/__init__.py",
    "tests/demo/__init__.py",
    "tests/demo/server.py",
    "tests/demo/load.py",
    "tests/demo/procs.py",
    "tests/engine/__init__.py",
    "tests/engine/middleware.py",
)
#: What the server imports. It is not installed: the package must bring its own, whatever the machine has.
_MODULES = ("uvicorn", "httptools", "click", "h11")
#: The last line of the newer version's configuration file: dpkg must choose between that file and the admin's.
NEWER_LINE = "# From a newer version of the package."


class PackageError(Exception):
    """There is no package to install; the text says what to do."""


def package() -> Path:
    """Return the newest .deb in dist/.

    Raises:
        PackageError: there is none.
    """
    found = sorted(ROOT.glob("dist/whyspan_*_amd64.deb"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise PackageError("no package in dist/: `make package` builds it")
    return found[-1]


def fill(folder: Path, deb: Path) -> tuple[str, str]:
    """Write everything into *folder*; return the versions of ``old.deb`` and ``new.deb`` there."""
    shutil.copy(deb, folder / "old.deb")
    versions = (_field(deb, "Version"), newer(deb, folder / "new.deb"))
    demo = folder / "demo"
    for name in _DEMO:
        (demo / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, demo / name)
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        shutil.copytree(next(iter(spec.submodule_search_locations)), demo / name)
    return versions


def newer(deb: Path, target: Path) -> str:
    """Pack the same files again under a higher version, with a changed configuration file; return that version."""
    version = f"{_field(deb, 'Version')}.1"
    tree = target.with_suffix(".tree")
    _run("dpkg-deb", "-R", str(deb), str(tree))
    control = tree / "DEBIAN/control"
    lines = control.read_text().splitlines()
    control.write_text(
        "".join(f"Version: {version}\n" if s.startswith("Version:") else f"{s}\n" for s in lines)
    )
    config = tree / "etc/whyspan/whyspan.toml"
    config.write_text(f"{config.read_text()}\n{NEWER_LINE}\n")
    sums = tree / "DEBIAN/md5sums"
    if sums.exists():
        kept = [s for s in sums.read_text().splitlines() if not s.endswith("etc/whyspan/whyspan.toml")]
        sums.write_text("".join(f"{s}\n" for s in kept))
    # Fast: it is unpacked once, by an emulated processor.
    _run("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", str(tree), str(target))
    shutil.rmtree(tree)
    return version


def _field(deb: Path, name: str) -> str:
    return _run("dpkg-deb", "-f", str(deb), name).strip()


def _run(*argv: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    return done.stdout
