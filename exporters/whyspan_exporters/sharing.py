"""Who may read what the daemon leaves on disk: its own user, and the group ``whyspan`` when it exists."""

from __future__ import annotations

import contextlib
import grp
import os
from pathlib import Path

GROUP = "whyspan"
FILE_MODE = 0o640
DIR_MODE = 0o750


def share(path: Path, mode: int) -> None:
    """Give *path* to the group and set its mode.

    Best effort: without the group, or the right to give files to it, *path* is its owner's only.
    """
    with contextlib.suppress(KeyError, OSError):
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    with contextlib.suppress(OSError):
        path.chmod(mode)


def make_dir(path: Path) -> None:
    """Make the folder *path* and its parents; a new one is shared, an existing one is left as it is.

    Raises:
        OSError: It cannot be made.
    """
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        share(path, DIR_MODE)
