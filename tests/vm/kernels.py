"""Debian's stock kernels, unpacked into the cache: ``python -m tests.vm.kernels [SERIES ...]``.

A kernel is ``$WHYSPAN_CACHE/kernels/RELEASE/``: ``boot/vmlinuz-RELEASE`` and ``lib/modules/RELEASE``, with depmod run.
The generic flavour: the cloud flavour has no 9p, which carries the output out of a guest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.engine.install import cache

#: Each series and the package that depends on its newest kernel.
SERIES = {"6.1": "linux-image-6.1-amd64", "6.12": "linux-image-6.12-amd64"}
#: The package that has no series in its name, by the release whose own kernel it is.
_META = "linux-image-amd64"
_SBIN = ":/usr/sbin:/sbin"


class KernelsError(Exception):
    """A kernel cannot be had here; the text says why, in one line."""


class Kernel(NamedTuple):
    """An unpacked kernel."""

    series: str  # "6.12"
    release: str  # what uname -r says in its guest
    folder: Path

    @property
    def image(self) -> Path:
        """The compressed kernel image."""
        return self.folder / "boot" / f"vmlinuz-{self.release}"

    @property
    def modules(self) -> Path:
        """The folder of its modules."""
        return self.folder / "lib" / "modules" / self.release


def _numbers(release: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", release)]


def _belongs(release: str, series: str) -> bool:
    return release.startswith(series + ".") and "-" in release


def cached(series: str) -> Kernel | None:
    """Return the newest kernel of a series that is in the cache."""
    folder = cache() / "kernels"
    found = [p for p in folder.iterdir() if _belongs(p.name, series)] if folder.is_dir() else []
    whole = [p for p in found if (p / "lib/modules" / p.name / "modules.dep").is_file()]
    newest = max(whole, key=lambda p: _numbers(p.name), default=None)
    return None if newest is None else Kernel(series, newest.name, newest)


def _package(series: str) -> str:
    """The name of the newest image package of a series, from what apt knows."""
    for meta in (SERIES.get(series, f"linux-image-{series}-amd64"), _META):
        shown = subprocess.run(["apt-cache", "depends", meta], capture_output=True, text=True, check=False)
        named = re.findall(r"Depends: linux-image-(\d\S+)", shown.stdout)
        if named and _belongs(named[0], series):
            return f"linux-image-{named[0]}"
    raise KernelsError(f"apt knows no kernel {series} (`apt-get update`?)")


def _run(command: list[str], cwd: Path) -> None:
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + _SBIN}
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        raise KernelsError(f"needs {e.filename}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        raise KernelsError(f"{command[0]}: {last[0]}")


def kernel(series: str) -> Kernel:
    """Return the newest cached kernel of a series ("6.12"), fetched from the machine's apt sources if there is none.

    Raises:
        KernelsError: it is not there and cannot be had.
    """
    there = cached(series)
    if there is not None:
        return there
    package = _package(series)
    release = package.removeprefix("linux-image-")
    kernels = cache() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=kernels) as made:
        folder = Path(made)
        _run(["apt-get", "download", package], folder)
        (deb,) = folder.glob("*.deb")
        whole = folder / release
        _run(["dpkg-deb", "--extract", str(deb), str(whole)], folder)
        shutil.rmtree(whole / "usr", ignore_errors=True)
        _run(["depmod", "--basedir", str(whole), release], folder)
        try:
            whole.rename(kernels / release)
        except OSError:
            if not (kernels / release).is_dir():  # somebody else may have been faster
                raise
    return Kernel(series, release, kernels / release)


def main() -> int:
    """Fetch the series named, or all that the tests use."""
    for series in sys.argv[1:] or SERIES:
        try:
            print(kernel(series).image)
        except KernelsError as e:
            print(f"kernels: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
