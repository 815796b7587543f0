"""What the steps of a package's build share: where things are, the date they bear, how commands are run."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGING = ROOT / "packaging"
LOCKS = PACKAGING / "locks"
#: Where the package's environment is on the machine it is installed on.
PREFIX = "usr/lib/whyspan"


class BuildError(Exception):
    """The package cannot be built here; the text says why, in one line."""


def project() -> dict[str, Any]:
    """Return the table ``[project]`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    quiet: bool = True,
) -> str:
    """Run a command and return its standard output; what it says otherwise is shown when it fails.

    Raises:
        BuildError: it failed.
    """
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        told = (done.stderr or done.stdout or "").strip()
        raise BuildError(f"{Path(str(command[0])).name} failed ({done.returncode})\n{told[-4000:]}")
    return done.stdout


def date_s() -> int:
    """Return the date that everything in a package bears: ``SOURCE_DATE_EPOCH``, else that of the last commit.

    Raises:
        BuildError: there is neither.
    """
    named = os.environ.get("SOURCE_DATE_EPOCH", "")
    if named.isascii() and named.isdigit():
        return int(named)
    try:
        return int(run(["git", "-C", ROOT, "log", "-1", "--format=%ct"]))
    except (BuildError, OSError, ValueError) as e:
        raise BuildError("no git and no SOURCE_DATE_EPOCH: which date should the package bear?") from e


def sources(below: str) -> list[str]:
    """Return the files of the tree below a folder, relative to the root: what git knows or would take, sorted.

    Raises:
        BuildError: git fails.
    """
    if not (ROOT / ".git").exists():  # an unpacked archive
        found = [ROOT / below, *(ROOT / below).rglob("*")]
        made = ("__pycache__", ".so", ".o")
        files = (p for p in found if p.is_file() and not ({*p.parts, p.suffix} & {*made}))
        return sorted(p.relative_to(ROOT).as_posix() for p in files)
    listed = run(["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard", "--", below])
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())
