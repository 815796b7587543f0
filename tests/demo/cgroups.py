"""A CPU cgroup of version 1 or 2: quota and weight, made and removed by the demo."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.demo.procs import DemoError

PARENT = "whyspan-demo"
DEFAULT_WEIGHT = 100  # in units of v2's cpu.weight; v1's cpu.shares is 1024 for the same


def _cpu_root() -> tuple[Path, int]:
    """Where CPU groups are made, and the version there.

    Raises:
        DemoError: no CPU controller is mounted.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(point), 1
    for mount in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        controllers = mount / "cgroup.controllers"
        if controllers.exists() and "cpu" in controllers.read_text().split():
            return mount, 2
    raise DemoError("no cgroup CPU controller is mounted: the quota fault needs one")


class CpuGroup:
    """One leaf group under ``whyspan-demo``. ``path`` is what /proc/PID/cgroup shows for its members."""

    def __init__(self, name: str) -> None:
        root, self.version = _cpu_root()
        self.path = f"/{PARENT}/{name}"
        self._dir = root / PARENT / name
        self._enabled: Path | None = None
        if self.version == 2:
            for parent in (root, root / PARENT):
                parent.mkdir(exist_ok=True)
                control = parent / "cgroup.subtree_control"
                if "cpu" not in control.read_text().split():
                    control.write_text("+cpu")
                    if parent == root:
                        self._enabled = control
        self._dir.mkdir(parents=True, exist_ok=True)
        self.set_quota(None)

    def join(self) -> None:
        """Put the calling process into the group (for use between fork and exec)."""
        (self._dir / "cgroup.procs").write_text(str(os.getpid()))

    def set_quota(self, ratio: float | None, period_us: int = 100_000) -> None:
        """Limit the group to ``ratio`` of one CPU (at least 1 ms a period), or lift the limit with None."""
        quota_us = None if ratio is None else max(1000, int(ratio * period_us))
        if self.version == 2:
            (self._dir / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
            return
        (self._dir / "cpu.cfs_quota_us").write_text("-1")
        (self._dir / "cpu.cfs_period_us").write_text(str(period_us))
        if quota_us is not None:
            (self._dir / "cpu.cfs_quota_us").write_text(str(quota_us))

    def set_weight(self, factor: float, *, parent: bool = False) -> None:
        """Give the group ``factor`` times the default weight, within what the kernel takes.

        *parent*: not the group but ``whyspan-demo``: its groups together, against all other processes of the machine.
        """
        where = self._dir.parent if parent else self._dir
        if self.version == 2:
            weight = min(10_000, max(1, round(DEFAULT_WEIGHT * factor)))
            (where / "cpu.weight").write_text(str(weight))
        else:
            (where / "cpu.shares").write_text(str(min(262_144, max(2, round(1024 * factor)))))

    def throttled_count(self) -> int:
        """Periods in which the group was throttled so far."""
        for line in (self._dir / "cpu.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "nr_throttled":
                return int(value)
        return 0

    def remove(self) -> None:
        """Remove the group once its last process is gone (at most 2 s), and the parent when empty."""
        for directory in (self._dir, self._dir.parent):
            for _ in range(20):
                try:
                    directory.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if directory is self._dir.parent and any(p.is_dir() for p in directory.iterdir()):
                        break
                    time.sleep(0.1)
        if self._enabled and not self._dir.parent.exists():
            self._enabled.write_text("-cpu")
