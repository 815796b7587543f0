"""What keeps the host's tasks waiting: pressure (PSI), the CPU quotas of the watched processes' control groups, memory
that is left, and how many threads want a CPU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan import cgroups
from whyspan.cgroups import Mount
from whyspan.hostfacts import cgroup_quota

#: What tasks can wait for, as the kernel names it.
RESOURCES: Final = ("cpu", "memory", "io")
_KINDS: Final = ("some", "full")
_MEMORY: Final = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
#: Control groups looked at every few seconds: a quarter of a millisecond each.
_MAX_GROUPS: Final = 32


class Limited(NamedTuple):
    """A control group with a CPU quota: its path, and how many CPUs it may use."""

    path: str
    cpus: float


def pressure(proc: Path = Path("/proc")) -> dict[str, dict[str, float]]:
    """Return by resource the share of the last 10 s in which some, or all, tasks waited for it.

    Empty where the kernel does not tell: without CONFIG_PSI, or booted with psi=0.
    """
    out: dict[str, dict[str, float]] = {}
    for resource in RESOURCES:
        found = _avg10(_read(proc / "pressure" / resource))
        if found:
            out[resource] = found
    return out


def memory(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return ``total_bytes`` and ``available_bytes`` of the host; empty when the kernel does not tell."""
    found = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        value = rest.strip().removesuffix(" kB")
        if name in _MEMORY and value.isdigit():
            found[_MEMORY[name]] = int(value) << 10
    return found


def runnable(proc: Path = Path("/proc")) -> int | None:
    """Return how many threads run or want to, ours included; None when the kernel does not tell."""
    # proc_pid_loadavg(5): 0.20 0.18 0.12 1/80 11206
    fields = _read(proc / "loadavg").split()
    running = fields[3].partition("/")[0] if len(fields) > 3 else ""
    return int(running) if running.isdigit() else None


def _avg10(text: str) -> dict[str, float]:
    """Of ``some avg10=1.23 avg60=...`` lines. Source: Documentation/accounting/psi.rst."""
    out = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        name, _, value = rest.partition(" ")[0].partition("=")
        if kind in _KINDS and name == "avg10":
            try:
                out[kind] = float(value) / 100
            except ValueError:
                continue
    return out


class Throttling:
    """Follows the control groups of processes: how long their quotas kept them from running."""

    def __init__(self, mounts: Iterable[Mount] | None = None) -> None:
        """*mounts*: the control group file systems; default: this host's."""
        self._mounts = cgroups.cpu_mounts(cgroups.mounts() if mounts is None else mounts)
        self._last_us: dict[str, int] = {}
        self.limits: dict[str, float] = {}  # by service, CPUs

    def look(self, groups: Iterable[tuple[str, str]]) -> Counter[str]:
        """Return by service with a quota the microseconds throttled since the last look, and set ``limits``.

        Args:
            groups: (service, path of the control group) of the watched processes.
        """
        quotas: dict[str, float] = {}
        concerned: dict[str, set[str]] = {}  # by service, all groups with a quota on the way up
        tightest: dict[str, dict[str, float]] = {}  # by service, what limits each of its groups most
        for service, leaf in sorted(set(groups))[:_MAX_GROUPS]:
            limited = [Limited(p, q) for p in cgroups.ancestors(leaf) if (q := self._cpus(p, quotas))]
            if limited:
                concerned.setdefault(service, set()).update(g.path for g in limited)
                tight = min(limited, key=lambda g: g.cpus)
                tightest.setdefault(service, {})[tight.path] = tight.cpus
        stalls = {path: self._since_last(path) for path in set().union(*concerned.values())}
        self._last_us = {path: us for path, us in self._last_us.items() if path in stalls}
        self.limits = {service: _sum(cpus) for service, cpus in tightest.items()}
        return Counter({service: sum(stalls[p] for p in paths) for service, paths in concerned.items()})

    def _cpus(self, path: str, known: dict[str, float]) -> float:
        if path not in known:
            quota = cgroup_quota(path, self._mounts)
            known[path] = quota[0] / quota[1] if quota and quota[1] else 0.0
        return known[path]

    def _since_last(self, path: str) -> int:
        now_us = self._throttled_us(path)
        before_us = self._last_us.get(path, now_us)  # what was before the first look is not ours to count
        self._last_us[path] = now_us
        return max(now_us - before_us, 0)

    def _throttled_us(self, path: str) -> int:
        # Sources: Documentation/admin-guide/cgroup-v2.rst; scheduler/sched-bwc.rst for version 1, which has ns.
        for mount in self._mounts:
            folder = cgroups.folder(path, mount)
            if folder is None:
                continue
            for line in _read(folder / "cpu.stat").splitlines():
                name, _, value = line.partition(" ")
                if value.isdigit() and name == "throttled_usec":
                    return int(value)
                if value.isdigit() and name == "throttled_time":
                    return int(value) // 1000
        return 0


def _sum(cpus: dict[str, float]) -> float:
    """Add up what groups may use; one that lies within another of them is in that one's already."""
    return sum(
        n for path, n in cpus.items() if not any(up in cpus for up in cgroups.ancestors(path) if up != path)
    )


def state(throttling: Throttling) -> dict[str, Any]:
    """Return what the collector's state says of the host."""
    return {
        "pressure": pressure(),
        "cpu_limits": dict(throttling.limits),
        "memory": memory(),
        "runnable": runnable(),
        "cpus": os.cpu_count(),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # EOPNOTSUPP with psi=0
        return ""
