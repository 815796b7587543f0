"""Describes processes that are not watched, but ran or woke beside those that are: a culprit's container."""

from __future__ import annotations

from pathlib import Path

from whyspan_probes.schema import Events

from whyspan import cgroups, containers, hostfacts
from whyspan.cgroups import Mount
from whyspan.model import Fact, ProcessFact
from whyspan.text import clean

_PF_KTHREAD = 0x00200000  # include/linux/sched.h
_MAX_PER_BATCH = 16
_FORGET_EVERY_S = 300.0  # a process may move to another cgroup, its number may go to another process
_MAX_PATH = 512


class Strangers:
    """Turns ``sched_name`` events into facts, each process once in five minutes and 16 of them per batch."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: set[tuple[int, int]] = set()
        self._forget_s = 0.0
        self._mounts: list[Mount] = []

    def facts(self, names: Events, now_s: float) -> list[Fact]:
        """Return what /proc says of the processes named; of one that is gone, what its cgroup's id says."""
        if now_s >= self._forget_s:
            self._forget_s = now_s + _FORGET_EVERY_S
            self._known.clear()
            self._mounts = cgroups.mounts()
        out: list[Fact] = []
        for row in names:
            key = int(row["tgid"]), int(row["cgroup_id"])
            if key in self._known or row["flags"] & _PF_KTHREAD:
                continue
            if len(out) >= _MAX_PER_BATCH:
                break
            self._known.add(key)
            comm = row["comm"].split(b"\0", 1)[0].decode("utf-8", "replace")
            fact = hostfacts.process_fact(key[0], "", self._proc) or self._gone(*key, comm)
            if fact is not None:
                out.append(fact)
        return out

    def _gone(self, tgid: int, cgroup_id: int, comm: str) -> ProcessFact | None:
        path = cgroups.path_of_id(cgroup_id, self._mounts)
        if not path:
            return None
        container = containers.identify(path)
        return ProcessFact(
            tgid=tgid,
            comm=clean(comm),
            cgroup=clean(path, _MAX_PATH),
            container_id=clean(container.id, 64),
            pod_uid=container.pod_uid,
        )
