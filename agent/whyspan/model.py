"""The records that cross stages: batches in, findings out. Types only, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from whyspan.marks import Mark

if TYPE_CHECKING:  # numpy stays out of the processes that only handle findings
    from whyspan_probes.schema import Events

#: The verdict when no rule holds.
UNKNOWN = "unknown"
#: Outcomes of requests that failed: a status of 400 or more, a connection that ended early, a process that did.
FAILED = frozenset({"error", "reset", "killed"})
#: Of these, the ones without a whole response.
UNFINISHED = frozenset({"reset", "killed"})


class HttpHead(msgspec.Struct, frozen=True, array_like=True):
    """A request head after parsing and sanitising; the raw bytes are gone.

    ``first_ns`` is when its first byte reached the socket, ``recv_ns`` when the process read it, ``ts_ns`` when
    the head was complete (all CLOCK_MONOTONIC). ``seq`` counts requests on the connection named by ``cookie``.
    ``cut``: the connection ended, or an answer came, before the head was complete.
    """

    ts_ns: int
    first_ns: int
    tid: int
    tgid: int
    cookie: int
    seq: int
    lport: int
    rport: int
    method: str
    route: str
    content_length: int
    traceparent: str
    headers: dict[str, str]
    malformed: bool = False
    recv_ns: int = 0
    cut: bool = False
    sent_ns: int = 0  # when its sender says that it began; a claim. 0 not said


class OwnFact(msgspec.Struct, frozen=True, tag=True):
    """A process of the agent's own."""

    tgid: int
    name: str


class TracerFact(msgspec.Struct, frozen=True, tag=True):
    """Who traces a thread (``TracerPid``), as seen when it was stopped; ``tracer_tgid`` 0 is nobody."""

    tid: int
    tracer_tgid: int
    comm: str = ""


class ProbeCostFact(msgspec.Struct, frozen=True, tag=True):
    """What a hit of one of our probes costs, as measured last, and the kinds of record that it makes."""

    probe: str
    ns_per_hit: float
    events: tuple[str, ...] = ()


class HostCpuFact(msgspec.Struct, frozen=True, tag=True):
    """The host's CPUs: NUMA nodes, the nodes of its GPUs, and its idle states as (name, exit latency in us).

    ``balancing``: the kernel moves pages and threads between nodes. ``base_khz``: the frequency that a CPU has without
    any boost, 0 not known.
    """

    nodes: int = 0
    gpu_nodes: tuple[int, ...] = ()
    balancing: bool = False
    idle_states: tuple[tuple[str, int], ...] = ()
    base_khz: int = 0


class ProcessFact(msgspec.Struct, frozen=True, tag=True):
    """What the host says of a process. ``comm`` and ``exe`` are base names, already escaped.

    ``cpu_mask`` has a bit for each CPU it may use, in hexadecimal: two processes' masks tell what they share.
    ``vpid`` is its number in its own PID namespace, 0 when that is ``tgid``; ``container_id`` and ``pod_uid`` come
    from its cgroup path and are empty outside a container. ``parent`` is the process that started it, as it was then.
    """

    tgid: int
    comm: str
    exe: str = ""
    service: str = ""
    cgroup: str = ""
    cpus_allowed: int = 0
    cpu_count: int = 0
    start_ticks: int = 0
    cpu_mask: str = ""
    vpid: int = 0
    container_id: str = ""
    pod_uid: str = ""
    parent: int = 0


class ThreadFact(msgspec.Struct, frozen=True, tag=True):
    """A thread's name."""

    tid: int
    tgid: int
    name: str


class CgroupFact(msgspec.Struct, frozen=True, tag=True):
    """CPU bandwidth of a cgroup; ``quota_us`` 0 means no quota."""

    path: str
    quota_us: int
    period_us: int


class TextRange(msgspec.Struct, frozen=True, array_like=True):
    """Code of a file that a process maps."""

    start: int
    end: int
    path: str


class LockFact(msgspec.Struct, frozen=True, tag=True):
    """What the addresses of a process's locks are; 0 where not known, ``note`` says why.

    ``gil_*``: the interpreter lock of CPython, or the structure it lies in; ``main_arena``: glibc's allocator's lock.
    """

    tgid: int
    gil_start: int = 0
    gil_end: int = 0
    main_arena: int = 0
    text: list[TextRange] = []
    note: str = ""


class FdFact(msgspec.Struct, frozen=True, tag=True):
    """What a descriptor was on. For a pipe or loopback socket, ``peer_*`` is the process at its other end."""

    tgid: int
    fd: int
    inode: int
    kind: str  # file, pipe, socket, tty, eventfd, other
    path: str = ""
    peer_tgid: int = 0
    peer_comm: str = ""


class MemoryUser(msgspec.Struct, frozen=True, array_like=True):
    """A process with the memory that only it has, bytes."""

    tgid: int
    comm: str
    rss_bytes: int


class MemoryFact(msgspec.Struct, frozen=True, tag=True):
    """A process's memory at a moment (CLOCK_MONOTONIC). Sizes in bytes.

    ``heaps`` counts the 64 MiB reservations of glibc's malloc arenas and ``heap_bytes`` what is committed of them, as
    of ``heaps_ns``, 0 before the first look: they are looked at rarely.
    """

    tgid: int
    ts_ns: int
    cgroup: str = ""  # its memory cgroup
    anon_bytes: int = 0
    file_bytes: int = 0
    shmem_bytes: int = 0
    swap_bytes: int = 0
    heaps: int = 0
    heap_bytes: int = 0
    heaps_ns: int = 0


class MemoryCgroupFact(msgspec.Struct, frozen=True, tag=True):
    """A memory cgroup with a limit, at a moment. Sizes in bytes; 0 where there is none.

    ``cgroup_id`` is the kernel's; ``hits`` counts how often the limit was reached (memory.events: max, or failcnt).
    ``users`` are the processes in it with most memory, where it is nearly full.
    """

    path: str
    cgroup_id: int
    ts_ns: int
    limit_bytes: int = 0
    high_bytes: int = 0
    usage_bytes: int = 0
    anon_bytes: int = 0
    file_bytes: int = 0
    swap_bytes: int = 0
    hits: int = 0
    high_hits: int = 0
    oom_kills: int = 0
    users: list[MemoryUser] = []


class HostMemoryFact(msgspec.Struct, frozen=True, tag=True):
    """The host's memory at a moment. Sizes in bytes; the counters are /proc/vmstat's since boot.

    ``users`` are the processes with most memory, when direct reclaim was last counted.
    """

    ts_ns: int
    total_bytes: int = 0
    free_bytes: int = 0
    available_bytes: int = 0
    cached_bytes: int = 0
    stalls: int = 0  # direct reclaims
    compact_stalls: int = 0
    oom_kills: int = 0
    users: list[MemoryUser] = []


class MappedFact(msgspec.Struct, frozen=True, tag=True):
    """A file that a process maps. ``dev`` as in records, major << 20 | minor."""

    tgid: int
    inode: int
    dev: int
    path: str


class DiskFact(msgspec.Struct, frozen=True, tag=True):
    """A block device, or a file system without one (FUSE, NFS). ``mounts`` are the first places that show it."""

    dev: int
    name: str
    mounts: tuple[str, ...] = ()


class SwapFact(msgspec.Struct, frozen=True, tag=True):
    """Where the host swaps to: the devices by number, and their names as /proc/swaps has them."""

    devs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class WriterFact(msgspec.Struct, frozen=True, tag=True):
    """A process that has a file open for writing whose data was written back."""

    dev: int
    inode: int
    tgid: int
    comm: str
    path: str


class DescriptorsFact(msgspec.Struct, frozen=True, tag=True):
    """What a process had open when it was refused another descriptor; ``limit`` is its own."""

    tgid: int
    limit: int
    open: int
    kinds: dict[str, int] = {}  # of those looked at: socket, file, pipe, event, other


class CodeFrame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of Python: what was executing where. ``function`` is qualified; empty: its name could not be had.

    ``line`` 0 is not known.
    """

    function: str
    file: str
    line: int


class StackFact(msgspec.Struct, frozen=True, tag=True):
    """A stack by its number, innermost frames first. ``flags`` as of ``cpu_sample``; 64: the program's break off.

    ``native`` are the program's frames, as ``function [module]`` where that is known and ``module+offset`` else;
    ``kernel`` are names of functions. Any of the three may be empty. A stack may be told again, when its frames have
    got names. ``work`` is the kind of work that it does (known_frames.toml), ``hint`` what may be done about it, each
    empty when not known.
    """

    id: int
    tgid: int
    flags: int
    python: list[CodeFrame] = []
    native: list[str] = []
    kernel: list[str] = []
    work: str = ""
    hint: str = ""


Fact = (
    ProcessFact
    | ThreadFact
    | CgroupFact
    | FdFact
    | LockFact
    | MemoryFact
    | MemoryCgroupFact
    | HostMemoryFact
    | OwnFact
    | TracerFact
    | ProbeCostFact
    | HostCpuFact
    | MappedFact
    | DiskFact
    | SwapFact
    | WriterFact
    | DescriptorsFact
    | StackFact
)


@dataclass(slots=True)
class Batch:
    """One drain: everything that arrived since the last one. The unit of recording and of replay.

    ``events`` is an EVENT array sorted by ``ts_ns``; ``now_ns`` (CLOCK_MONOTONIC) is when the drain began, and
    every event before it has arrived. ``lost`` counts records dropped since the last batch, by event name.
    """

    now_ns: int
    events: Events
    heads: list[HttpHead] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)  # by time

    def __post_init__(self) -> None:
        from whyspan_probes.schema import EVENT

        assert self.events.dtype == EVENT


class Request(msgspec.Struct, kw_only=True):
    """One request on a watched server. Times are CLOCK_MONOTONIC ns; 0 means not yet."""

    trace_id: str  # 32 hex digits
    trace_id_source: str  # traceparent, generated
    parent_span_id: str = ""
    sampled: bool = True
    request_id: str = ""  # x-request-id
    tenant: str = ""  # x-tenant-id
    service: str
    tgid: int
    start_tid: int  # the thread that read its head
    end_tid: int = 0  # the thread that wrote its last byte
    method: str
    route: str
    status: int = 0  # HTTP status, 0 when none was sent
    outcome: str = "ok"  # ok, error, reset, killed, lost, open
    # server (it answered), client_close, client_reset, server_close, server_reset, timeout, process_exit, engine_exit;
    # or empty
    ended_by: str = ""
    exit_code: int = 0  # wait status of the process, where its exit ended the request
    head: str = "whole"  # cut: the rest of it never came; malformed; unread: no process read any of it
    start_ns: int
    recv_ns: int = 0  # the process began to read it; before, it waited in the socket
    head_ns: int = 0  # status line written
    first_ns: int = 0  # first body byte written
    end_ns: int = 0
    left_ns: int = 0  # the client closed its side; it may still have read
    chunks: int = 0  # body writes
    request_bytes: int = 0
    response_bytes: int = 0
    cookie: int = 0
    seq: int = 0
    client_port: int = 0
    server_port: int = 0
    agent: str = ""  # first product of its User-Agent
    attempt: int = 0  # attempts before this one, as its sender says
    client_wait_ns: int = 0  # it waited with its sender before its first byte, by the sender's clock


class Segment(msgspec.Struct, kw_only=True):
    """A piece of the critical path. Segments of a request are disjoint and tile its interval exactly.

    ``state``: running, runnable, throttled, blocked, wakeup, unknown. ``cause`` is a cause id of CAUSES.md, a
    kind of usual work (``work.cpu``, ``work.timer``, ``work.peer``, ``work.blocked``...), or ``unknown``.
    """

    start_ns: int
    end_ns: int
    tgid: int
    tid: int
    thread: str
    state: str
    cause: str
    detail: str = ""
    inferred: bool = False


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """Who did it. ``kind``: cgroup, process, thread, cpu, file, peer, request, cache, model, or empty: nobody is named.

    ``trace_id`` and ``span_id`` are set when the culprit is another request: a span link goes there.
    """

    kind: str = ""
    name: str = ""
    tgid: int = 0
    tid: int = 0
    detail: str = ""
    trace_id: str = ""
    span_id: str = ""


class RuledOut(msgspec.Struct, frozen=True):
    """A cause considered and set aside, with the check that did it."""

    cause: str
    check: str


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """Another cause of the same slow request, behind the verdict's."""

    cause: str
    excess_ms: float
    share: float
    culprit: Culprit = Culprit()


class CodeStack(msgspec.Struct, kw_only=True):
    """What a thread was executing while a cause took its time, innermost frames first, and how often it was seen so.

    ``native`` has the program's frames as module+offset or function, ``kernel`` the names of functions. ``cut``: there
    are more frames than these. ``holder``: of the thread that had the interpreter lock, while another waited for it.
    ``blocked``: the thread was blocked there, and ``samples`` counts such blocks.
    Of a thread with frames of Python ``native`` is what the innermost of these called; its last line may be
    ``(frames missing)``. ``work`` and ``hint`` as of `StackFact`.
    """

    cause: str
    tgid: int
    tid: int
    thread: str = ""
    samples: int = 0
    python: list[CodeFrame] = []
    native: list[str] = []
    kernel: list[str] = []
    cut: bool = False
    holder: bool = False
    blocked: bool = False
    work: str = ""
    hint: str = ""


class ThreadGroup(msgspec.Struct, kw_only=True):
    """Threads that were in the same place in the same state when their process was looked at.

    ``threads`` has the names of some. ``state``: running, runnable, blocked, in the system call ``syscall``. ``for_ms``
    is how long the first of them had been so at least; 0 not known. ``stalled``: it serves the request. Frames as of
    `CodeStack`.
    """

    state: str
    count: int = 1
    threads: list[str] = []
    syscall: str = ""
    for_ms: float = 0.0
    stalled: bool = False
    python: list[CodeFrame] = []
    native: list[str] = []
    kernel: list[str] = []
    cut: bool = False


class Snapshot(msgspec.Struct, kw_only=True):
    """All threads of a process at one moment, taken since one that serves requests stalled, or its engine froze."""

    at_ns: int
    tgid: int
    process: str = ""
    groups: list[ThreadGroup] = []
    left_out: int = 0  # threads in groups beyond those


class Verdict(msgspec.Struct, kw_only=True):
    """Why a request was slow, in one sentence and in numbers. ``others``: more causes with excess, greatest first.

    ``code`` is where most of the cause's time went, as far as it was sampled.
    """

    cause: str = UNKNOWN
    excess_ms: float = 0.0
    share: float = 0.0  # of the request's whole excess, 0..1
    confidence: float = 0.0  # 0..1
    culprit: Culprit = Culprit()
    sentence: str = ""
    evidence: list[str] = []
    fix: str = ""
    others: list[Ranked] = []
    code: CodeFrame | None = None


class PhaseTime(msgspec.Struct, frozen=True, array_like=True):
    """A phase of a request: frontend, handover, queue, prefill, decode, delivery. They follow each other."""

    name: str
    start_ns: int
    end_ns: int


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """A step of the engine during a request, or ``count`` of them in a row. Steps may overlap.

    ``batch``: sequences, the most of any of them; ``tokens``: computed, of all sequences, their sum. ``kv_usage``: of
    the pool when the last was scheduled, 0..1, -1 not known. ``mine``: the request took part in one of them.
    ``end_ns`` is the request's end for one in progress.
    """

    start_ns: int
    end_ns: int
    batch: int
    tokens: int
    kv_usage: float = -1.0
    count: int = 1
    mine: bool = True


class EngineFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the engine said of a request. Tokens and steps are sums over its completions.

    ``state``: of the marks: ok, degraded, heard. ``batch`` is the median number of sequences in its steps,
    ``kv_usage`` the most of the pool in use during them (0..1, -1 not known).
    """

    engine: str = ""
    version: str = ""
    state: str = ""
    core_tgid: int = 0
    request_id: str = ""  # the engine's, as its caller knows it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    batch: int = 0
    kv_usage: float = -1.0
    n: int = 1
    template: str = ""
    model: str = ""
    server_span_id: str = (
        ""  # the server's own span for the request, in the request's trace; mostly not known
    )
    step_times: list[StepTime] = []  # in order, neighbours joined evenly so that they are few


class Finding(msgspec.Struct, kw_only=True):
    """A request explained: its path, the time per cause, and the verdict when it was slow."""

    request: Request
    slow: bool
    slow_reason: str = ""
    phase: str = ""  # ttft or stream: where most of the excess lies
    wall_ns: int
    accounted_ns: int
    segments: list[Segment]
    causes: dict[str, float]  # ms
    baseline: dict[str, float]  # ms; empty when none
    baseline_count: int = 0
    verdict: Verdict
    ruled_out: list[RuledOut] = []
    lost_events: int = 0
    process: ProcessFact | None = None  # the one that served it, as known then
    phases: list[PhaseTime] = []  # as the engine tells them; they tile the request
    engine: EngineFacts | None = None
    stacks: list[CodeStack] = []  # sampled on the path, those seen most often first
    snapshots: list[Snapshot] = []
