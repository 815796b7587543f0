"""A memory cgroup of version 1 or 2 for a process of the bench, made and removed by it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tests.demo.procs import DemoError

PARENT = "whyspan-bench"


def memory_root() -> tuple[Path, int]:
    """Return where memory groups are made, and the version there.

    Raises:
        DemoError: no memory controller is mounted.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(point), 1
        if kind == "cgroup2" and "memory" in (Path(point) / "cgroup.controllers").read_text().split():
            return Path(point), 2
    raise DemoError("no cgroup memory controller is mounted")


class MemoryGroup:
    """One leaf group. ``folder`` is its directory, ``path`` what /proc/PID/cgroup shows for its members."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        """Make it, or take the one that is there; a limit of 0 is none."""
        root, self.version = memory_root()
        self.path = f"/{PARENT}/{name}"
        self.folder = root / PARENT / name
        if self.version == 2:
            for parent in (root, root / PARENT):
                parent.mkdir(exist_ok=True)
                (parent / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.limit(limit_bytes)

    def join(self) -> None:
        """Put the calling process into the group (for use between fork and exec)."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, limit_bytes: int) -> None:
        """Change the limit; 0 is none."""
        if self.version == 2:
            (self.folder / "memory.max").write_text(str(limit_bytes or "max"))
        else:
            (self.folder / "memory.limit_in_bytes").write_text(str(limit_bytes or -1))

    def usage(self) -> int:
        """Return the bytes charged to it now."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def stat(self) -> dict[str, int]:
        """Return its memory.stat."""
        pairs = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return {key: int(value) for key, value in pairs}

    def hits(self) -> int:
        """Return how often its limit was reached."""
        if self.version == 1:
            return int((self.folder / "memory.failcnt").read_text())
        pairs = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
        return int(pairs["max"])

    def kills(self) -> int:
        """Return how many processes the OOM killer ended in it."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        pairs = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(pairs["oom_kill"])

    def remove(self) -> None:
        """Remove the group once its last process is gone (at most 2 s), and the parent when empty."""
        for _ in range(20):
            try:
                self.folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.1)
        with suppress(OSError):
            self.folder.parent.rmdir()
