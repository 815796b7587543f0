"""Root folders of other Debian releases, for another C library and Python; made once and cached.

``python -m tests.roots [SUITE ...]`` makes them beforehand (root; 40 s and 0.3 GB each).
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

SUITES = ("trixie", "sid")  # CPython 3.13 and 3.14
_SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"


class RootsError(Exception):
    """A root cannot be made here; the text says why, in one line."""


class Source(NamedTuple):
    """A Debian archive that apt knows, and the keys it is checked with."""

    uri: str
    keyring: str


def sources(folder: Path = Path("/etc/apt")) -> list[Source]:
    """Return the archives of this machine's apt that may hold Debian releases, in order."""
    found: list[Source] = []
    lists = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.list"))]
    for path in lists:
        text = path.read_text() if path.exists() else ""
        for options, uri in re.findall(r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)", text, re.M):
            key = re.search(r"signed-by=(\S+)", options)
            found.append(Source(uri, key[1] if key else ""))
    for path in sorted((folder / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            uris = re.search(r"^URIs:\s*(.+)$", stanza, re.M)
            key = re.search(r"^Signed-By:\s*(/\S+)$", stanza, re.M)
            found += [Source(uri, key[1] if key else "") for uri in (uris[1].split() if uris else [])]
    return [s for s in dict.fromkeys(found) if s.uri.rstrip("/").endswith("/debian")]


def root(suite: str) -> Path:
    """Return the root folder of a release, made now if it is not there yet.

    Raises:
        RootsError: it is not there and cannot be made.
    """
    final = cache() / "roots" / suite
    if final.is_dir():
        return final
    if os.geteuid() != 0:
        raise RootsError("needs root: debootstrap makes devices and changes owners")
    tool = shutil.which("debootstrap", path=os.environ.get("PATH", "") + _SBIN)
    if tool is None:
        raise RootsError("needs debootstrap: `make deps` installs it")
    known = sources()
    if not known:
        raise RootsError("apt knows no Debian archive")
    final.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and renamed: what is there is whole.
    with tempfile.TemporaryDirectory(
        prefix=f".{suite}-", dir=final.parent, ignore_cleanup_errors=True
    ) as made:
        target = Path(made) / suite
        keys = [f"--keyring={known[0].keyring}"] if known[0].keyring else []
        done = subprocess.run(
            [tool, "--variant=minbase", "--include=python3", *keys, suite, str(target), known[0].uri],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "PATH": os.environ.get("PATH", "") + _SBIN},
            check=False,
        )
        if done.returncode:
            last = done.stdout.strip().splitlines()[-1:] or ["no output"]
            raise RootsError(f"debootstrap {suite}: {last[0]}")
        shutil.rmtree(target / "var/cache/apt", ignore_errors=True)
        try:
            target.rename(final)
        except OSError:
            if not final.is_dir():  # somebody else may have been faster
                raise
    return final


def main() -> int:
    """Make the roots named, or all that the tests use."""
    for suite in sys.argv[1:] or SUITES:
        try:
            print(root(suite))
        except RootsError as e:
            print(f"roots: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
