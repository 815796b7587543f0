"""Who may read what the daemon leaves on disk: its own user, and the group ``whyspan`` when it exists.

The group is for readers. As services the collector runs as the *user* ``whyspan``, who alone may hand over findings.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from pathlib import Path

GROUP = "whyspan"
FILE_MODE = 0o640
DIR_MODE = 0o750
#: To connect takes the right to write; whoever else of the group does is sent away (`may_deliver`).
SOCKET_MODE = 0o660
COLLECTOR_USER = "whyspan"


def may_deliver(uid: int) -> bool:
    """Whether a user may hand over findings: root, this process's own user, and the collector's."""
    if uid in (0, os.geteuid()):
        return True
    try:
        return uid == pwd.getpwnam(COLLECTOR_USER).pw_uid
    except KeyError:
        return False


def share(path: Path, mode: int) -> None:
    """Give *path* to the group and set its mode.

    Best effort: without the group, or the right to give files to it, *path* is its owner's only.
    """
    with contextlib.suppress(KeyError, OSError):
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    with contextlib.suppress(OSError):
        path.chmod(mode)


def share_with_group(path: Path, mode: int) -> None:
    """Give *path* to the group and set its mode; leave it as it is when it cannot be given away."""
    with contextlib.suppress(KeyError, OSError):
        gid = grp.getgrnam(GROUP).gr_gid
        if path.stat().st_gid != gid:
            os.chown(path, -1, gid)
        path.chmod(mode)


def make_dir(path: Path) -> None:
    """Make the folder *path* and its parents; a new one is shared, an existing one is left as it is.

    Raises:
        OSError: It cannot be made.
    """
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        share(path, DIR_MODE)
