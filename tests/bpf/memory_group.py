"""A small memory cgroup of a test's own, of version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.bpf.waiting import until
from tests.faults.host.groups import memory_root


class Group:
    """The group in *folder*; ``path`` is what /proc/PID/cgroup shows, ``id`` the kernel's number."""

    def __init__(self, folder: Path, version: int, path: str) -> None:
        self.folder, self.version, self.path = folder, version, path
        self.id = folder.stat().st_ino

    def limit(self, limit_bytes: int) -> None:
        """Set its limit; swap is not allowed beyond it."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.folder / name).write_text(str(limit_bytes))

    def usage(self) -> int:
        """Return the bytes charged to it."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text())

    def join(self, pid: int = 0) -> None:
        """Put a process into it."""
        (self.folder / "cgroup.procs").write_text(str(pid or os.getpid()))

    def kills(self) -> int:
        """Return how many processes the OOM killer ended in it."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        pairs = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(pairs["oom_kill"])

    def empty(self) -> bool:
        """Whether nobody is in it."""
        return not (self.folder / "cgroup.procs").read_text().strip()


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[Group]:
    """Make a group, and remove it when its processes are gone; skips where there is no memory controller."""
    from tests.demo.procs import DemoError

    try:
        root, version = memory_root()
    except DemoError as e:
        pytest.skip(str(e))
    path = f"/whyspan-test-{os.getpid()}-{name}"
    folder = root / path[1:]
    if version == 2:
        (root / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    group = Group(folder, version, path)
    try:
        group.limit(limit_bytes)
        yield group
    finally:
        until(group.empty, "the group's processes are gone")
        with suppress(OSError):
            folder.rmdir()
