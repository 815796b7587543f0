"""The reports of bursts that a slow request triggered: a few files in the state folder, the oldest go first."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from whyspan.burst.report import Report

KEPT = 32
_MAX_BYTES = 8 << 20
_FOLDER = "bursts"


def folder(state_dir: Path) -> Path:
    """Return where they lie."""
    return state_dir / _FOLDER


def path_for(state_dir: Path, kind: str, unix_ns: int, tgid: int) -> Path:
    """Return the file of a burst; names sort by time."""
    return folder(state_dir) / f"{unix_ns:020d}-{kind}-{tgid}.json"


def tidy(state_dir: Path) -> None:
    """Remove all but the newest."""
    for path in stored(state_dir)[KEPT:]:
        path.unlink(missing_ok=True)


def stored(state_dir: Path) -> list[Path]:
    """Return the files, the newest first."""
    try:
        found = [p for p in folder(state_dir).iterdir() if p.suffix == ".json"]
    except OSError:
        return []
    return sorted(found, reverse=True)


def read(path: Path) -> Report | None:
    """Return a report; None when the file is none, or not yet whole."""
    try:
        with path.open("rb") as f:
            data = f.read(_MAX_BYTES + 1)
        return msgspec.json.decode(data, type=Report) if len(data) <= _MAX_BYTES else None
    except (OSError, msgspec.MsgspecError):
        return None


def write(path: Path, report: Report) -> None:
    """Write it so that a reader sees all of it or nothing. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.encode(report))
    os.replace(temporary, path)
