"""A small language for timelines: times in ms on a clock that starts at one second."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
from whyspan.causes import Classified, Context, classify
from whyspan.critical_path import Path, walk
from whyspan.facts import Facts
from whyspan.model import Batch, CgroupFact, FdFact, ProcessFact, Request, ThreadFact
from whyspan.threads import Timelines
from whyspan_probes.schema import EVENT, Events, EventType, Schema

MS = 1_000_000
ORIGIN_NS = 1_000_000_000

#: The service, its loop thread and its worker thread; a hog that nobody watches.
SERVER, LOOP, WORKER = 100, 100, 101
HOG = 900
COOKIE = 77

EPOLL_WAIT, FUTEX, WRITE, FSYNC, SENDTO, NANOSLEEP = 232, 202, 1, 74, 44, 230
S, D = 1, 2

_HEAD = [("ts_ns", "<u8"), ("tid", "<u4"), ("tgid", "<u4"), ("kind", "<u2"), ("cpu", "<u2"), ("aux", "<u4")]
_PAYLOADS: dict[str, list[tuple[str, str]]] = {
    "sched_switch_out": [
        ("next_tid", "<u4"),
        ("next_tgid", "<u4"),
        ("syscall_nr", "<i4"),
        ("flags", "<u4"),
        ("throttled_ns", "<u8"),
        ("arg0", "<u8"),
    ],
    "sched_switch_in": [
        ("prev_tid", "<u4"),
        ("prev_tgid", "<u4"),
        ("throttled_ns", "<u8"),
        ("prev_state", "<u4"),
        ("prev_flags", "<u4"),
        ("pad", "<u8"),
    ],
    "sched_wake": [
        ("waker_tid", "<u4"),
        ("waker_tgid", "<u4"),
        ("waker_nr", "<i4"),
        ("softirq_vec", "<u4"),
        ("target_cpu", "<u4"),
        ("flags", "<u4"),
        ("pad", "<u8"),
    ],
    "sched_fork": [("child_tid", "<u4"), ("child_tgid", "<u4"), ("comm", "S16"), ("pad", "<u8")],
    "sched_exec": [("comm", "S16"), ("pad", "S16")],
    "sched_name": [("comm", "S16"), ("cgroup_id", "<u8"), ("flags", "<u4"), ("ppid", "<u4")],
    "sock_recv": [
        ("key", "<u8"),
        ("peer", "<u8"),
        ("offset", "<u8"),
        ("bytes", "<u4"),
        ("lport", "<u2"),
        ("rport", "<u2"),
    ],
    "edge_write": [
        ("key", "<u8"),
        ("duration_ns", "<u8"),
        ("bytes", "<i8"),
        ("fd", "<i4"),
        ("syscall_nr", "<i4"),
    ],
    "fd_block": [
        ("inode", "<u8"),
        ("key", "<u8"),
        ("fd", "<i4"),
        ("syscall_nr", "<i4"),
        ("dev", "<u4"),
        ("lport", "<u2"),
        ("rport", "<u2"),
    ],
    "block_done": [
        ("sector", "<u8"),
        ("issue_ns", "<u8"),
        ("latency_ns", "<u8"),
        ("dev", "<u4"),
        ("bytes", "<u4"),
    ],
}
_PAYLOADS["sock_send"] = _PAYLOADS["sock_recv"]
_PAYLOADS["tls_handshake"] = [
    ("begin_ns", "<u8"),
    ("cookie", "<u8"),
    ("session", "<u8"),
    ("calls", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
]
_PAYLOADS["edge_read"] = _PAYLOADS["edge_write"]

SCHEMA = Schema(
    EventType(name, kind, np.dtype([*_HEAD, *fields]))
    for kind, (name, fields) in enumerate(sorted(_PAYLOADS.items()), start=3)
)


def ns(ms: float) -> int:
    """Return the nanosecond of a moment in ms on the tests' clock."""
    return ORIGIN_NS + round(ms * MS)


class EventBuilder:
    """Collects events; every method takes the time in ms and the subject thread first."""

    schema: ClassVar[Schema] = SCHEMA

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes]] = []
        self.facts: list[ProcessFact | ThreadFact | CgroupFact | FdFact] = []
        self.tgids: dict[int, int] = {LOOP: SERVER, WORKER: SERVER, 0: 0}

    def tgid(self, tid: int) -> int:
        """Return the process of a thread: set in ``tgids``, else the thread's own number."""
        return self.tgids.get(tid, tid)

    def add(self, name: str, ms: float, tid: int, cpu: int = 0, aux: int = 0, **payload: Any) -> Self:
        """Add an event of any kind; payload fields not given are zero."""
        row = np.zeros(1, self.schema.types[name].dtype)
        row["ts_ns"], row["tid"], row["tgid"] = ns(ms), tid, self.tgid(tid)
        row["kind"], row["cpu"], row["aux"] = self.schema.kind(name), cpu, aux
        for field, value in payload.items():
            row[field] = value
        self.rows.append((ns(ms), row.tobytes()))
        return self

    def out(
        self,
        ms: float,
        tid: int,
        state: int = S,
        *,
        nr: int = FUTEX,
        next_tid: int = 0,
        cpu: int = 0,
        flags: int = 4,
        throttled_ms: float = 0,
        arg0: int = 0,
    ) -> EventBuilder:
        """The thread leaves the CPU; state 0 is preempted."""
        return self.add(
            "sched_switch_out",
            ms,
            tid,
            cpu,
            state,
            next_tid=next_tid,
            next_tgid=self.tgid(next_tid),
            syscall_nr=nr,
            flags=flags,
            throttled_ns=round(throttled_ms * MS),
            arg0=arg0,
        )

    def into(
        self, ms: float, tid: int, prev_tid: int = 0, cpu: int = 0, throttled_ms: float = 0
    ) -> EventBuilder:
        """The thread gets the CPU."""
        return self.add(
            "sched_switch_in",
            ms,
            tid,
            cpu,
            prev_tid=prev_tid,
            prev_tgid=self.tgid(prev_tid),
            throttled_ns=round(throttled_ms * MS),
        )

    def wake(
        self, ms: float, tid: int, by: int = 0, *, context: int = 0, nr: int = FUTEX, vec: int = 0
    ) -> EventBuilder:
        """The thread is woken; context 0 task, 1 timer, 2 softirq, 3 hard interrupt."""
        return self.add(
            "sched_wake",
            ms,
            tid,
            aux=context,
            waker_tid=by,
            waker_tgid=self.tgid(by),
            waker_nr=nr,
            softirq_vec=vec,
        )

    def send(self, ms: float, tid: int, key: int = COOKIE, **payload: Any) -> EventBuilder:
        """The thread has sent on an inet socket (``aux=1``: unix)."""
        return self.add("sock_send", ms, tid, **{"aux": 2, "bytes": 10, "key": key, **payload})

    def recv(self, ms: float, tid: int, key: int = COOKIE, **payload: Any) -> EventBuilder:
        """The thread has received on an inet socket (``aux=1``: unix)."""
        return self.add("sock_recv", ms, tid, **{"aux": 2, "bytes": 10, "key": key, **payload})

    def edge(self, name: str, ms: float, tid: int, key: int = 5, **payload: Any) -> EventBuilder:
        """The thread writes (``edge_write``) or has read (``edge_read``) an eventfd."""
        return self.add(name, ms, tid, **{"aux": 1, "bytes": 8, "key": key, **payload})

    def chunk(self) -> Events:
        """Return the events as one EVENT array, sorted by time, first added first."""
        rows = sorted(self.rows, key=lambda r: r[0])
        return np.frombuffer(b"".join(r[1] for r in rows), EVENT)

    def chunks(self, *cuts_ms: float) -> list[Events]:
        """Return the events as successive arrays, cut at the given moments."""
        whole = self.chunk()
        return np.split(whole, [int(np.searchsorted(whole["ts_ns"], ns(c))) for c in cuts_ms])

    def known(self, *facts: ProcessFact | ThreadFact | CgroupFact | FdFact) -> EventBuilder:
        """Add facts."""
        self.facts.extend(facts)
        return self

    def timelines(self, start_ms: float, end_ms: float, *cuts_ms: float) -> Timelines:
        """Return the timelines of a window, the server being known as service ``svc`` on 2 CPUs."""
        facts = Facts()
        server = ProcessFact(SERVER, "server", service="svc", cgroup="/svc/web", cpus_allowed=2)
        names = [ThreadFact(LOOP, SERVER, "loop"), ThreadFact(WORKER, SERVER, "worker")]
        events = self.chunk()
        facts.update(Batch(0, events, facts=[server, *names, ProcessFact(HOG, "hog"), *self.facts]), SCHEMA)
        return Timelines(SCHEMA, self.chunks(*cuts_ms), ns(start_ms), ns(end_ms), facts)

    def walk(self, request: Request) -> tuple[Path, Timelines]:
        """Return the critical path of a request over these events."""
        timelines = self.timelines(0, 0)
        return walk(timelines, request), timelines

    def classify(self, request: Request) -> tuple[Classified, Context]:
        """Return the classified critical path of a request over these events."""
        path, timelines = self.walk(request)
        ctx = Context(timelines, request)
        return classify(path, ctx), ctx


def request(start_ms: float, end_ms: float, **fields: Any) -> Request:
    """Return a request served by LOOP; ``first_ms`` sets its first byte out."""
    first_ms = fields.pop("first_ms", end_ms)
    values: dict[str, Any] = {
        "trace_id": "0" * 31 + "1",
        "trace_id_source": "generated",
        "service": "svc",
        "tgid": SERVER,
        "start_tid": LOOP,
        "end_tid": LOOP,
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "start_ns": ns(start_ms),
        "head_ns": ns(first_ms),
        "first_ns": ns(first_ms),
        "end_ns": ns(end_ms),
        "cookie": COOKIE,
    }
    return Request(**{**values, **fields})


def shape(path: Path) -> list[tuple[float, float, int, str]]:
    """Return the path as (start ms, end ms, tid, state)."""
    return [
        ((s.start_ns - ORIGIN_NS) / MS, (s.end_ns - ORIGIN_NS) / MS, s.tid, s.state) for s in path.segments
    ]


def ms_of(c: Classified) -> dict[str, float]:
    """Return the causes with their ms, rounded to the microsecond."""
    return {cause: round(ms, 3) for cause, ms in c.causes.items()}
