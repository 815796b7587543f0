"""What the rules share: the request's service, its loop threads, and who else used the CPUs and the disk."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import numpy as np

from whyspan.beside import Beside
from whyspan.causes.goes import Go, long_goes
from whyspan.containers import short
from whyspan.critical_path import Path, PathSegment
from whyspan.engines import EngineView
from whyspan.facts import Facts
from whyspan.model import FdFact, Request
from whyspan.syscalls import POLL
from whyspan.threads import Timelines
from whyspan.timeline import Rival

MS: Final = 1_000_000
# Instants at which the demand for CPUs is sampled, per segment and per request.
_SAMPLES: Final = 3
_MAX_DEMANDS: Final = 8
T = TypeVar("T")


class Context:
    """One request in its surroundings. Every answer is memoised; nothing here changes."""

    def __init__(
        self,
        timelines: Timelines,
        request: Request,
        engine: EngineView | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.timelines = timelines
        self.request = request
        self.engine = engine
        self.beside = beside if beside is not None else Beside()  # the requests beside it
        self.path: Path | None = None  # the critical path that is being classified
        self._memo: dict[Any, Any] = {}
        self.facts: Facts = timelines.facts
        self.service_tgids = self.facts.tgids(request.service) | {request.tgid}
        self._goes: dict[int, list[Go]] = {}
        self._labels: dict[tuple[int, int], str] = {}
        self._demand: dict[tuple[int, int], float] = {}
        self._rivals: dict[tuple[int, int, int], Rival] = {}
        self._servers: frozenset[int] | None = None

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what *make* returns, made once per request for each key."""
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found

    def thread_label(self, tid: int, tgid: int) -> str:
        """Return a name for a thread: its own, its process's, or its number."""
        label = self._labels.get((tid, tgid))
        if label is None:
            label = self._labels[tid, tgid] = self.facts.thread_name(tid, tgid) or f"thread {tid}"
        return label

    def process_label(self, tgid: int, tid: int = 0) -> str:
        """Return the name of a process."""
        return self.facts.comm(tgid, tid)

    def where(self, tgid: int) -> str:
        """Return in which container, or else cgroup, a process is; empty when that is not known or says nothing."""
        other, own = self.facts.process(tgid), self.facts.process(self.request.tgid)
        if other is None:
            return ""
        if other.container_id:
            same = own is not None and own.container_id == other.container_id
            return "in the same container" if same else f"in container {short(other.container_id)}"
        return f"cgroup {other.cgroup}" if other.cgroup not in ("", "/") else ""

    def cpus(self) -> int:
        """Return how many CPUs the service may use; 0 when not known."""
        return self.facts.cpus_of(self.service_tgids)

    def rival(self, segment: PathSegment) -> Rival | None:
        """Return who had the CPU for most of the segment's whole wait; None when idle or unknown."""
        seen = segment.rival
        if seen is None:
            return None
        key = (segment.tid, seen.start_ns, seen.whole_ns)
        if key not in self._rivals:
            used = self.timelines.occupancy(seen.cpu, seen.start_ns, seen.start_ns + seen.whole_ns)
            used.pop((segment.tid, segment.tgid), None)
            if used:
                (tid, tgid), _ = max(used.items(), key=lambda kv: (kv[1], kv[0]))
                seen = seen._replace(tid=tid, tgid=tgid)
            self._rivals[key] = seen
        found = self._rivals[key]
        return None if found.tid == 0 else found

    def demand(self, segment: PathSegment) -> float:
        """Return how many threads of the service wanted a CPU during a segment, on average."""
        key = (segment.start_ns, segment.end_ns)
        if key in self._demand:
            return self._demand[key]
        if len(self._demand) >= _MAX_DEMANDS:
            return sum(self._demand.values()) / len(self._demand)
        members = [tid for tid, tgid in self.timelines.members().items() if tgid in self.service_tgids]
        wanting = 0
        for k in range(1, _SAMPLES + 1):
            t = segment.start_ns + segment.ns * k // (_SAMPLES + 1)
            for tid in members:
                wanting += self.timelines.thread(tid).awake(t + 1)
        self._demand[key] = wanting / _SAMPLES
        return self._demand[key]

    def serves(self, tid: int) -> bool:
        """Return whether the thread reads request heads or writes responses."""
        if self._servers is None:
            rows = self.timelines.keyed("sock_send", "key", self.request.cookie)
            senders = (
                rows["tid"][rows["tgid"] == self.request.tgid] if self.request.cookie else rows["tid"][:0]
            )
            ends = {self.request.start_tid, self.request.end_tid}
            self._servers = frozenset(ends | set(np.unique(senders).tolist()))
        return tid in self._servers

    def loops(self, tid: int) -> bool:
        """Return whether a thread runs an event loop: it rests in a polling call, or, with no time for a rest, writes
        to several connections.
        """

        def look() -> bool:
            if self.timelines.thread(tid).poll_edges(POLL)[1]:
                return True
            sent = self.timelines.rows_of(tid, "sock_send")
            return len(sent) > 0 and len(np.unique(sent["key"])) > 1

        return self.memo(("loops", tid), look)

    def goes(self, tid: int) -> list[Go]:
        """Return the long goes of a loop thread around the request; none when it is not a loop thread."""
        if tid not in self._goes:
            found: list[Go] = []
            if self.serves(tid):
                left, calls = self.timelines.thread(tid).poll_edges(POLL)
                if calls:
                    # Python's sockets wait in poll(2) for their time-outs: only the call the thread rests
                    # in most is the loop's own.
                    main = Counter(calls).most_common(1)[0][0]
                    rests = [t for t, nr in zip(left, calls, strict=True) if nr == main]
                    found = long_goes(self.timelines, tid, rests, self.request.start_ns, self.request.end_ns)
            self._goes[tid] = found
        return self._goes[tid]

    def go_at(self, tid: int, t: int) -> Go | None:
        """Return the long go of a loop thread that holds the moment after *t*."""
        goes = self.goes(tid)
        i = bisect_right([g.start_ns for g in goes], t) - 1
        return goes[i] if i >= 0 and t < goes[i].end_ns else None

    def descriptor(self, segment: PathSegment) -> tuple[int, FdFact | None]:
        """Return the descriptor number a segment is blocked on (-1 unknown) and what it is known to be."""
        wait = segment.wait
        if wait is None:
            return -1, None
        fd = wait.fd.fd if wait.fd is not None else wait.arg0 if wait.syscall_nr >= 0 else -1
        fact = self.facts.fd(segment.tgid, fd) if fd >= 0 else None
        if fact is not None and wait.fd is not None and fact.inode and fact.inode != wait.fd.inode:
            fact = None  # the number has been reused since
        return fd, fact

    def write_call_ns(self, segment: PathSegment) -> int:
        """Return how long the write that holds a segment took in all; 0 when it is not seen."""
        rows = self.timelines.rows_of(segment.tid, "edge_write")
        if not len(rows):
            return 0
        i = int(rows["ts_ns"].searchsorted(np.uint64(segment.start_ns), "right")) - 1
        if i < 0:
            return 0
        took = int(rows["duration_ns"][i])
        return took if int(rows["ts_ns"][i]) + took >= segment.end_ns else 0
