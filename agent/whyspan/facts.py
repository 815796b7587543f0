"""What is known of processes, threads, cgroups and descriptors, accumulated from batches and bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from whyspan_probes.schema import Events, Schema

from whyspan.lru import Lru
from whyspan.memory import Memory
from whyspan.model import (
    Batch,
    CgroupFact,
    DescriptorsFact,
    DiskFact,
    FdFact,
    HostCpuFact,
    HostMemoryFact,
    LockFact,
    MappedFact,
    MemoryCgroupFact,
    MemoryFact,
    OwnFact,
    ProbeCostFact,
    ProcessFact,
    StackFact,
    SwapFact,
    ThreadFact,
    TracerFact,
    WriterFact,
)
from whyspan.observers import Observers
from whyspan.storage import Storage
from whyspan.text import clean

_TICK_NS: Final = 10_000_000  # USER_HZ is 100 on every architecture that Linux has a BPF JIT for
_MAX_STACKS: Final = 8192  # some 2 KB each; the kernel sends one again after 10 s
_MAX_LOCKS: Final = 512  # processes: each with some 100 ranges of code
_YIELDED: Final = 8  # flag of sched_switch_out: the thread was in sched_yield


class Death(NamedTuple):
    """The end of a process; ``exit_code`` is its wait status, ``born_ns`` 0 when its birth was not seen."""

    ts_ns: int
    tgid: int
    name: str
    service: str
    exit_code: int
    born_ns: int


class Facts:
    """Names, services, cgroups and descriptors as of the last batch fed.

    Later facts replace earlier ones. Facts of exited processes stay until they are crowded out, since the
    requests they served are explained after the exit.
    """

    def __init__(
        self,
        processes: int = 4096,
        threads: int = 16384,
        cgroups: int = 1024,
        fds: int = 8192,
        deaths: int = 256,
    ) -> None:
        self._processes: Lru[int, ProcessFact] = Lru(processes)
        self._threads: Lru[int, ThreadFact] = Lru(threads)
        self._cgroups: Lru[str, CgroupFact] = Lru(cgroups)
        self._fds: Lru[tuple[int, int], FdFact] = Lru(fds)
        self._locks: Lru[int, LockFact] = Lru(_MAX_LOCKS)
        self._descriptors: Lru[int, DescriptorsFact] = Lru(processes)
        self._stacks: Lru[int, StackFact] = Lru(_MAX_STACKS)
        self._spinners: Lru[int, int] = Lru(threads)
        self._born: Lru[int, int] = Lru(processes)
        self._deaths: deque[Death] = deque(maxlen=deaths)
        self.memory = Memory()
        self.observers = Observers()
        self.storage = Storage()

    def update(self, batch: Batch, schema: Schema) -> None:
        """Take in a batch: its events first, then its facts, which know more."""
        for fact in batch.facts:
            # What a process forks is the same service's, in the very first batch, too.
            if isinstance(fact, ProcessFact) and fact.service and self._processes.get(fact.tgid) is None:
                self._processes.put(fact.tgid, fact)
        self._spun(batch.events, schema)
        self.memory.see(batch.events, schema)
        for row in _decoded(batch.events, schema, "sched_fork"):
            self._forked(row)
        for row in _decoded(batch.events, schema, "sched_name"):
            self._named(row["tid"], row["tgid"], _text(row["comm"]), bool(row["flags"] & 0x00200000))
        for row in _decoded(batch.events, schema, "sched_exec"):
            self._executed(row["tid"], row["tgid"], _text(row["comm"]))
        for fact in batch.facts:
            if isinstance(fact, ProcessFact):
                known = self._processes.get(fact.tgid)
                # Of one that has ended little can be said: that it was ours is not forgotten over it.
                if known is None or not known.service or fact.service or fact.start_ticks:
                    self._processes.put(fact.tgid, fact)
            elif isinstance(fact, ThreadFact):
                self._threads.put(fact.tid, fact)
            elif isinstance(fact, LockFact):
                self._locks.put(fact.tgid, fact)
            elif isinstance(fact, CgroupFact):
                self._cgroups.put(fact.path, fact)
            elif isinstance(fact, MemoryFact | MemoryCgroupFact | HostMemoryFact):
                self.memory.put(fact)
            elif isinstance(fact, OwnFact | TracerFact | ProbeCostFact | HostCpuFact):
                self.observers.put(fact)
            elif isinstance(fact, MappedFact | DiskFact | SwapFact | WriterFact):
                self.storage.put(fact)
            elif isinstance(fact, StackFact):
                self._stacks.put(fact.id, fact)
            elif isinstance(fact, DescriptorsFact):
                self._descriptors.put(fact.tgid, fact)
            else:
                self._fds.put((fact.tgid, fact.fd), fact)
        for row in _decoded(batch.events, schema, "sched_exit"):
            self._ended(row)

    def _spun(self, events: Events, schema: Schema) -> None:
        left = schema.types.get("sched_switch_out")
        if left is not None:
            # A switch-out is the commonest event there is: looked at in place, not selected.
            yielded = (events["kind"] == left.kind) & ((events.view(left.dtype)["flags"] & _YIELDED) != 0)
            for tid in np.unique(events["tid"][yielded]).tolist():
                self._spinners.put(tid, tid)

    def _forked(self, row: dict[str, Any]) -> None:
        # A child process serves the same service, in the same cgroup, until a fact says otherwise.
        child = row["child_tgid"]
        comm = _text(row["comm"])
        if child != row["tgid"]:
            self._born.put(child, row["ts_ns"])
        parent = self._processes.get(row["tgid"])
        if child != row["tgid"] and parent is not None and self._processes.get(child) is None:
            self._processes.put(
                child,
                msgspec.structs.replace(
                    parent, tgid=child, comm=comm or parent.comm, parent=parent.tgid, start_ticks=0, vpid=0
                ),
            )
        if comm:
            self._threads.put(row["child_tid"], ThreadFact(row["child_tid"], child, comm))

    def _ended(self, row: dict[str, Any]) -> None:
        tgid = row["tgid"]
        self._spinners.pop(row["tid"])  # its number may come again
        # Ends in good order are many (every helper that is called) and explain nothing.
        if row["aux"] == 1 and row["exit_code"]:
            name, born = self.comm(tgid, row["tid"]), self._born.get(tgid) or 0
            self._deaths.append(Death(row["ts_ns"], tgid, name, self.service(tgid), row["exit_code"], born))

    def _named(self, tid: int, tgid: int, comm: str, whole: bool) -> None:
        self._threads.put(tid, ThreadFact(tid, tgid, comm))
        known = self._processes.get(tgid)
        if known is None:
            # Any thread's name beats none for a process seen only as a rival or a waker.
            self._processes.put(tgid, ProcessFact(tgid, comm))
        elif (tid == tgid or whole) and not known.service:
            self._processes.put(tgid, msgspec.structs.replace(known, comm=comm))

    def _executed(self, tid: int, tgid: int, comm: str) -> None:
        self._named(tid, tgid, comm, True)
        known = self._processes.get(tgid)
        # What only its birth told of it holds its parent's name.
        if known is not None and known.comm != comm and not known.start_ticks:
            self._processes.put(tgid, msgspec.structs.replace(known, comm=comm, exe=""))

    def process(self, tgid: int) -> ProcessFact | None:
        """Return what is known of a process, or None."""
        return self._processes.get(tgid)

    def service(self, tgid: int) -> str:
        """Return the service a process belongs to, empty when it is not watched."""
        fact = self._processes.get(tgid)
        return "" if fact is None else fact.service

    def parent(self, tgid: int) -> int:
        """Return the process that started a process; 0 when not known."""
        fact = self._processes.get(tgid)
        return 0 if fact is None else fact.parent

    def started_ns(self, tgid: int) -> int:
        """Return when a process started, to the kernel's clock tick, CLOCK_MONOTONIC ns; 0 when not known.

        The kernel counts from the boot; a host that was suspended since has a difference, and servers are not.
        """
        fact = self._processes.get(tgid)
        return 0 if fact is None else fact.start_ticks * _TICK_NS

    def tgids(self, service: str) -> frozenset[int]:
        """Return the known processes of a service."""
        return frozenset(p.tgid for p in self._processes.values() if service and p.service == service)

    def deaths(self, service: str, since_ns: int, until_ns: int) -> list[Death]:
        """Return the processes of a service that ended by a signal or with an error in [since, until], oldest first."""
        found = [d for d in self._deaths if d.service == service and since_ns <= d.ts_ns <= until_ns]
        return sorted(found) if service else []

    def comm(self, tgid: int, tid: int = 0) -> str:
        """Return the name of a process, else of the given thread of it, else ``process TGID``."""
        if tgid == 0:
            return "idle"
        fact = self._processes.get(tgid)
        if fact is not None and fact.comm:
            return fact.comm
        thread = self._threads.get(tid or tgid)
        return thread.name if thread is not None else f"process {tgid}"

    def thread_name(self, tid: int, tgid: int = 0) -> str:
        """Return the name of a thread, else that of its process, else empty."""
        thread = self._threads.get(tid)
        if thread is not None:
            return thread.name
        fact = self._processes.get(tgid)
        return "" if fact is None else fact.comm

    def cpus_allowed(self, tgid: int) -> int:
        """Return the number of CPUs a process may run on; 0 when not known."""
        fact = self._processes.get(tgid)
        return 0 if fact is None else fact.cpus_allowed or fact.cpu_count

    def cpus_of(self, tgids: Iterable[int]) -> int:
        """Return the number of CPUs that processes may run on together; 0 when not known."""
        mask, least = 0, 0
        for tgid in tgids:
            fact = self._processes.get(tgid)
            mask |= int(fact.cpu_mask, 16) if fact is not None and fact.cpu_mask else 0
            least = max(least, self.cpus_allowed(tgid))
        return max(mask.bit_count(), least)

    def cgroup(self, tgid: int) -> str:
        """Return the cgroup path of a process, empty when not known."""
        fact = self._processes.get(tgid)
        return "" if fact is None else fact.cgroup

    def quota(self, tgid: int) -> CgroupFact | None:
        """Return the nearest cgroup, from the process's own upwards, that has a CPU quota."""
        path = self.cgroup(tgid)
        while path:
            fact = self._cgroups.get(path)
            if fact is not None and fact.quota_us > 0:
                return fact
            parent = path.rsplit("/", 1)[0]
            path = parent if parent != path else ""
        root = self._cgroups.get("/")
        return root if root is not None and root.quota_us > 0 else None

    def spins(self, tid: int) -> bool:
        """Return whether the thread was ever seen to give its CPU away by sched_yield.

        Such a thread polls for something that no wake-up will announce. Alone on its CPU its yields are not seen; but
        even there something else wants to run every few seconds.
        """
        return self._spinners.get(tid) is not None

    def locks(self, tgid: int) -> LockFact | None:
        """Return what the locks of a process are, or None; a child has its parent's until it is looked at."""
        return self._locks.get(tgid) or self._locks.get(self.parent(tgid))

    def stack(self, number: int) -> StackFact | None:
        """Return a stack by its number, or None."""
        return self._stacks.get(number)

    def descriptors(self, tgid: int) -> DescriptorsFact | None:
        """Return what a process had open when it was last refused a descriptor, or None."""
        return self._descriptors.get(tgid)

    def fd(self, tgid: int, fd: int) -> FdFact | None:
        """Return what a descriptor was on when last looked at, or None."""
        return self._fds.get((tgid, fd))


def _decoded(events: Events, schema: Schema, name: str) -> list[dict[str, Any]]:
    rows = schema.select(events, name)
    names = rows.dtype.names or ()
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]


def _text(raw: bytes) -> str:
    # A process chooses its own name: nothing unprintable may reach a terminal or a log.
    return clean(raw.split(b"\0", 1)[0].decode("utf-8", "replace"))
