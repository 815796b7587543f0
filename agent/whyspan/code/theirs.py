"""Opens files as a watched process has them, whoever put them there."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from whyspan.code.asked import Module

_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_STEP: Final = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW


def opened(module: Module) -> tuple[int, int]:
    """Return (descriptor, process that has it) of the very file that is meant. Raises OSError."""
    for tgid, span in module.holders:
        for path in (f"/proc/{tgid}/map_files/{span}", f"/proc/{tgid}/root{module.path}"):
            with contextlib.suppress(OSError, ValueError):
                # Not blocking on a pipe, nor waking a device: whoever owns the path may have put either there.
                if not stat.S_ISREG(os.stat(path).st_mode):
                    continue
                fd = os.open(path, _OPEN)
                s = os.fstat(fd)
                device = os.major(s.st_dev), os.minor(s.st_dev)
                it = (*device, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
                same = it == module.id if module.id else s.st_ino == module.inode
                if same and stat.S_ISREG(s.st_mode) and os.pread(fd, 4, 0) == b"\x7fELF":
                    return fd, tgid
                os.close(fd)
    raise OSError("its file cannot be had")


def within(root: int, path: str) -> int:
    """Open a file below a folder, over no link. Raises OSError."""
    *folders, name = path.split("/")
    at = os.dup(root)
    try:
        for folder in folders:
            step = os.open(folder, _STEP | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = step
        fd = os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd


def root_of(tgid: int) -> int:
    """Open the root folder of a process. Raises OSError."""
    return os.open(f"/proc/{tgid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def debug_file(tgid: int, build_id: str) -> int:
    """Open a file's debug information in its process's own root, where bcc does not look. Raises OSError."""
    root = root_of(tgid)
    try:
        if os.path.samestat(os.fstat(root), os.stat("/")):
            raise OSError("its root is ours")
        return within(root, f"usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug")
    finally:
        os.close(root)
