"""A small language for timelines: times in ms on a clock that starts at one second."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
from whyspan.causes import Classified, Context, classify
from whyspan.critical_path import Path, walk
from whyspan.facts import Facts
from whyspan.model import Batch, Fact, ProcessFact, Request, ThreadFact
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
    "page_wait": [
        ("inode", "<u8"),
        ("index", "<u8"),
        ("pages", "<u4"),
        ("dev", "<u4"),
        ("syscall_nr", "<i4"),
        ("swapped", "<u4"),
    ],
    "file_flush": [("inode", "<u8"), ("pages", "<u4"), ("dev", "<u4"), ("file", "S16")],
    "dirty_pause": [("dev", "<u4"), ("pages", "<u4"), ("comm", "S16"), ("pad", "<u8")],
    "block_done": [
        ("sector", "<u8"),
        ("issue_ns", "<u8"),
        ("latency_ns", "<u8"),
        ("dev", "<u4"),
        ("bytes", "<u4"),
    ],
}
_PAYLOADS["sock_send"] = _PAYLOADS["sock_recv"]
_PAYLOADS["gc_pause"] = [("begin_ns", "<u8"), ("collected", "<i8"), ("_pad", "V16")]
_PAYLOADS["cpu_sample"] = [("stack", "<u8"), ("ip", "<u8"), ("_pad", "V16")]
_PAYLOADS["wait_stack"] = [("stack", "<u8"), ("since_ns", "<u8"), ("ip", "<u8"), ("_pad", "<u8")]
_PAYLOADS["thread_state"] = [
    ("stack", "<u8"),
    ("snapshot", "<u8"),
    ("since_ns", "<u8"),
    ("syscall_nr", "<i4"),
    ("last_cpu", "<u2"),
    ("state", "<u2"),
]
_PAYLOADS["gc_start"] = [("_pad", "V32")]
_PAYLOADS["descriptor_refused"] = [
    ("limit", "<u8"),
    ("syscall_nr", "<i4"),
    ("times", "<u4"),
    ("_pad", "V16"),
]
_PAYLOADS["sched_stolen"] = [("stolen_ns", "<u8"), ("syscall_nr", "<i4"), ("_pad", "<u4"), ("_pad2", "V16")]
_PAYLOADS["power_woken"] = [("idle_ns", "<u8"), ("left_ns", "<u8"), ("_pad", "V16")]
_PAYLOADS["power_frequency"] = [("khz", "<u4"), ("before_khz", "<u4"), ("_pad", "V24")]
_PAYLOADS["numa_migrated"] = [("begin_ns", "<u8"), ("pages", "<u8"), ("failed", "<u8"), ("_pad", "<u8")]
_PAYLOADS["numa_moved"] = [("from_cpu", "<i4"), ("to_cpu", "<i4"), ("_pad", "V24")]
_PAYLOADS["futex_wait"] = [
    ("uaddr", "<u8"),
    ("ip", "<u8"),
    ("val", "<u4"),
    ("owner", "<u4"),
    ("_pad", "<u8"),
]
_PAYLOADS["futex_from"] = [("word0", "<u8"), ("word1", "<u8"), ("word2", "<u8"), ("word3", "<u8")]
_PAYLOADS["mmap_lock_wait"] = [
    ("owner_tid", "<u4"),
    ("owner_tgid", "<u4"),
    ("key", "<u8"),
    ("_pad", "V16"),
]
_PAYLOADS["direct_reclaim"] = [
    ("begin_ns", "<u8"),
    ("cgroup_id", "<u8"),
    ("pages", "<u4"),
    ("limit_pages", "<u4"),
    ("busy_us", "<u4"),
    ("calls", "<u2"),
    ("throttled_ms", "<u2"),
]
_PAYLOADS["memcg_reclaim"] = _PAYLOADS["compaction"] = _PAYLOADS["direct_reclaim"]
_PAYLOADS["sched_exit"] = [("exit_code", "<u4"), ("_pad", "<u4"), ("comm", "S16"), ("_pad2", "<u8")]
_PAYLOADS["oom_victim"] = [
    ("cgroup_id", "<u8"),
    ("limit_pages", "<u4"),
    ("usage_pages", "<u4"),
    ("anon_pages", "<u4"),
    ("file_pages", "<u4"),
    ("shmem_pages", "<u4"),
    ("uid", "<u4"),
]
_PAYLOADS["oom_name"] = [
    ("comm", "S16"),
    ("asker_tid", "<u4"),
    ("asker_tgid", "<u4"),
    ("score_adj", "<i4"),
    ("swap_pages", "<u4"),
]
_PAYLOADS["tls_handshake"] = [
    ("begin_ns", "<u8"),
    ("cookie", "<u8"),
    ("session", "<u8"),
    ("calls", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
]
_PAYLOADS["tcp_retransmit"] = [
    ("cookie", "<u8"),
    ("seq", "<u4"),
    ("rto_us", "<u4"),
    ("srtt_us", "<u4"),
    ("total", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
    ("state", "<u2"),
    ("timeouts", "<u2"),
]
_PAYLOADS["tcp_connect"] = [
    ("cookie", "<u8"),
    ("duration_ns", "<u8"),
    ("error", "<u4"),
    ("again", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
    ("failed", "<u4"),
]
_PAYLOADS["tcp_synack"] = [
    ("cookie", "<u8"),
    ("again", "<u4"),
    ("backlog", "<u4"),
    ("limit", "<u4"),
    ("drops", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
    ("_pad", "<u4"),
]
_PAYLOADS["accept_queue"] = [
    ("cookie", "<u8"),
    ("_pad", "<u8"),
    ("backlog", "<u4"),
    ("limit", "<u4"),
    ("drops", "<u4"),
    ("lport", "<u2"),
    ("_pad2", "<u2"),
]
_PAYLOADS["sock_held"] = [
    ("cookie", "<u8"),
    ("held_ns", "<u8"),
    ("left_ns", "<u8"),
    ("bytes", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
]
_PAYLOADS["sock_hole"] = [
    ("cookie", "<u8"),
    ("_pad", "<u8"),
    ("packets", "<u4"),
    ("total", "<u4"),
    ("srtt_us", "<u4"),
    ("lport", "<u2"),
    ("rport", "<u2"),
]
_PAYLOADS["dns_message"] = [
    ("cookie", "<u8"),
    ("_pad", "V16"),
    ("bytes", "<u4"),
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
        self.facts: list[Fact] = []
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

    def locked(
        self,
        ms: float,
        tid: int,
        address: int,
        *,
        op: int = 0,
        val: int = 2,
        ip: int = 0,
        words: tuple[int, ...] = (),
        cpu: int = 0,
        **payload: Any,
    ) -> EventBuilder:
        """The thread goes to sleep at a futex; by default as glibc's mutexes do."""
        self.add("futex_wait", ms, tid, cpu, op, uaddr=address, val=val, ip=ip, **payload)
        if words:
            self.add("futex_from", ms, tid, cpu, len(words), **{f"word{i}": w for i, w in enumerate(words)})
        return self.out(ms, tid, cpu=cpu, arg0=address)

    def send(self, ms: float, tid: int, key: int = COOKIE, **payload: Any) -> EventBuilder:
        """The thread has sent on an inet socket (``aux=1``: unix)."""
        return self.add("sock_send", ms, tid, **{"aux": 2, "bytes": 10, "key": key, **payload})

    def recv(self, ms: float, tid: int, key: int = COOKIE, **payload: Any) -> EventBuilder:
        """The thread has received on an inet socket (``aux=1``: unix)."""
        return self.add("sock_recv", ms, tid, **{"aux": 2, "bytes": 10, "key": key, **payload})

    def edge(self, name: str, ms: float, tid: int, key: int = 5, **payload: Any) -> EventBuilder:
        """The thread writes (``edge_write``) or has read (``edge_read``) an eventfd."""
        return self.add(name, ms, tid, **{"aux": 1, "bytes": 8, "key": key, **payload})

    def reclaim(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        tid: int,
        *,
        busy_ms: float | None = None,
        **payload: Any,
    ) -> EventBuilder:
        """The thread has freed memory (``direct_reclaim``, ``memcg_reclaim``) or done ``compaction``."""
        busy = end_ms - start_ms if busy_ms is None else busy_ms
        own = {"begin_ns": ns(start_ms), "busy_us": round(busy * 1000), "calls": 1}
        return self.add(name, end_ms, tid, **{**own, **payload})

    def oom(self, ms: float, tgid: int, comm: str = "", *, asker: int = 0, **payload: Any) -> EventBuilder:
        """The OOM killer has chosen a process; it dies of it at once."""
        self.add("oom_victim", ms, tgid, **payload)
        self.add("oom_name", ms, tgid, comm=comm.encode(), asker_tid=asker, asker_tgid=asker)
        return self.add("sched_exit", ms + 0.1, tgid, aux=1, exit_code=9)

    def chunk(self) -> Events:
        """Return the events as one EVENT array, sorted by time, first added first."""
        rows = sorted(self.rows, key=lambda r: r[0])
        return np.frombuffer(b"".join(r[1] for r in rows), EVENT)

    def chunks(self, *cuts_ms: float) -> list[Events]:
        """Return the events as successive arrays, cut at the given moments."""
        whole = self.chunk()
        return np.split(whole, [int(np.searchsorted(whole["ts_ns"], ns(c))) for c in cuts_ms])

    def known(self, *facts: Fact) -> EventBuilder:
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
