"""The shapes of what is shown. Types only, no behaviour.

Texts of a `Row`, of `Facets` and of the services and causes of a `TailView` are as they were sent, cut off: values to
filter by. All others are `clean`: what a terminal or a text's direction would obey is a visible escape.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

#: Values of a facet, most frequent first.
MAX_FACETS: Final = 50
#: Causes with a series of their own in `TailView`; what is behind them is `OTHER`.
MAX_CAUSES: Final = 8
OTHER: Final = "other"
#: Points of a series of `TailView` and `HostView`.
MAX_POINTS: Final = 600


class Row(msgspec.Struct, kw_only=True):
    """A request in the list. ``cause`` is empty when it was neither slow nor failed.

    ``phase``: frontend, handover, queue, prefill, decode, delivery; ttft or stream where no engine tells; or empty.
    """

    id: str
    trace_id: str
    service: str
    method: str
    route: str
    model: str
    tenant: str
    start_unix_ms: float
    latency_ms: float
    ttft_ms: float | None  # null: no byte of a body was sent
    status: int  # 0: none was sent
    outcome: str  # ok, error, reset, killed, lost, open
    slow: bool
    failed: bool
    cause: str
    excess_ms: float
    share: float  # of the request's whole excess, 0..1
    confidence: float  # 0..1
    culprit_kind: str
    culprit: str
    phase: str


class Page(msgspec.Struct, kw_only=True):
    """A page of the list. ``next`` is the cursor of the page behind it, empty at the end; ``total`` counts all."""

    rows: list[Row]
    total: int
    next: str


class Facets(msgspec.Struct, kw_only=True):
    """What the list can be filtered by, most frequent first; at most `MAX_FACETS` each."""

    services: list[str]
    causes: list[str]
    culprits: list[str]
    tenants: list[str]
    models: list[str]
    routes: list[str]


class Piece(msgspec.Struct, array_like=True):
    """A piece of a lane, ns since the request's start. An array in JSON: there are up to 50,000.

    ``state`` of a thread: running, runnable, throttled, blocked, wakeup, unknown; the name of a phase; step, or others'
    step when the request took no part in it.
    """

    start_ns: int
    end_ns: int
    state: str
    cause: str
    detail: str
    inferred: bool


class Lane(msgspec.Struct, kw_only=True):
    """A track of the timeline. ``spans`` are disjoint and in order; ``points`` are of counter lanes, in order.

    ``key``: phases, tid:1234, steps, batch, kv, gpu:0:stream:7, pressure:cpu. ``kind``: phase, thread, steps, gpu,
    counter.
    """

    key: str
    kind: str
    label: str
    tgid: int = 0
    tid: int = 0
    spans: list[Piece] = []
    points: list[tuple[int, float]] = []  # ns since the request's start, value from then on
    unit: str = ""  # of the points: ratio (0..1), count


class CauseBar(msgspec.Struct, kw_only=True):
    """The time of a request that went into a cause. ``usual_ms`` is null when there is no baseline."""

    cause: str
    ms: float
    usual_ms: float | None
    excess_ms: float  # ms - usual_ms, not below 0; 0 without a baseline


class CulpritView(msgspec.Struct, kw_only=True):
    """Who did it; ``kind`` and ``name`` are empty when nobody is named."""

    kind: str
    name: str
    tgid: int
    tid: int
    detail: str
    trace_id: str  # when the culprit is another request


class OtherCause(msgspec.Struct, kw_only=True):
    """Another cause of the same slow request, behind the verdict's."""

    cause: str
    excess_ms: float
    share: float
    culprit: CulpritView


class VerdictView(msgspec.Struct, kw_only=True):
    """Why the request was slow or failed; ``cause`` and ``sentence`` are empty when it was neither."""

    sentence: str
    cause: str
    excess_ms: float
    share: float
    confidence: float
    culprit: CulpritView
    evidence: list[str]
    fix: str
    others: list[OtherCause]
    code: str  # where most of the cause's time went: function (file:line); empty: not sampled


class RuledOutView(msgspec.Struct, kw_only=True):
    """A cause set aside, and the check that did it. ``near``: easily mixed up with the one found, or it took time."""

    cause: str
    check: str
    near: bool


class ProcessView(msgspec.Struct, kw_only=True):
    """The process that served the request, as known then."""

    tgid: int
    comm: str
    exe: str
    service: str
    cgroup: str
    cpus_allowed: int
    cpu_count: int
    vpid: int  # its number in its own PID namespace; 0: the same
    container_id: str
    pod_uid: str


class RequestFacts(msgspec.Struct, kw_only=True):
    """What else is known of the request. Sizes in bytes."""

    request_id: str  # x-request-id
    trace_id_source: str  # traceparent, generated
    ended_by: str
    slow_reason: str
    head: str  # whole, cut, malformed, unread
    chunks: int
    request_bytes: int
    response_bytes: int
    client_port: int
    server_port: int
    agent: str
    attempt: int
    client_wait_ns: int


class Link(msgspec.Struct, kw_only=True):
    """Where to look further. ``kind``: trace, request (``href`` is the store's id), runbook (a file of the docs)."""

    kind: str
    label: str
    href: str


class Named(msgspec.Struct, kw_only=True):
    """A total with its name."""

    name: str
    value: int


class FrameView(msgspec.Struct, kw_only=True):
    """A frame of a stack. ``kind``: python, native, kernel, other (it stands for frames that are not known).

    ``place``: file:line, or the module of a native one; empty where not known.
    """

    kind: str
    name: str
    place: str


class CodeNode(msgspec.Struct, kw_only=True):
    """A function in a tree of stacks, called by its ``parent``. ``kind`` as of `FrameView`, or thread: the outermost.

    It was seen in ``samples``, in ``own`` of them innermost. ``start``: samples to its left in a drawing.
    """

    parent: int  # index in the tree's nodes; -1: none
    depth: int
    start: int
    samples: int
    own: int
    kind: str
    name: str
    place: str  # as of `FrameView`, at the line that was seen most often
    lines: list[tuple[int, int]]  # (line, samples), where it was seen at several; most often first


class CodeTree(msgspec.Struct, kw_only=True):
    """The stacks of a cause as one tree: a node is behind its parent, siblings by samples; of depth 0 are threads."""

    cause: str
    blocked: bool  # samples counts long waits rather than samples of the CPU
    samples: int
    nodes: list[CodeNode]
    top: int  # the node of the function that stands for most of it; -1: none of Python does
    sentence: str  # the same in words
    work: list[Named]  # kinds of work by samples, most first


class ThreadGroupView(msgspec.Struct, kw_only=True):
    """Threads that were in the same place in the same state. ``frames``: the innermost first."""

    state: str  # running, runnable, blocked
    syscall: str
    for_ms: float  # at least; 0: not known
    count: int
    threads: list[str]  # names of some
    stalled: bool  # it serves the request
    frames: list[FrameView]


class SnapshotView(msgspec.Struct, kw_only=True):
    """All threads of a process at a moment, ns since the request's start; those that stalled come first."""

    at_ns: int
    tgid: int
    process: str
    groups: list[ThreadGroupView]
    left_out: int  # threads in groups beyond those


class CodeView(msgspec.Struct, kw_only=True):
    """Which code the request's time went to. The first tree is the verdict's, if it has one.

    ``sampled``: whether the sampler ran meanwhile; null: not known.
    """

    trees: list[CodeTree]
    left_out: int  # trees beyond those
    snapshots: list[SnapshotView]
    sampled: bool | None


class RequestView(msgspec.Struct, kw_only=True):
    """One request. Lanes: phases, threads in the order in which the path visits them, steps, gpu, counters.

    ``path``: the critical path by time, as (index of the lane, index of the piece in its ``spans``). Its pieces
    tile the request's interval, ``wall_ns`` long.
    """

    row: Row
    request: RequestFacts
    wall_ns: int
    accounted_ns: int
    lost_events: int
    first_ns: int | None  # first body byte
    lanes: list[Lane]
    path: list[tuple[int, int]]
    causes: list[CauseBar]  # longest first
    baseline_count: int  # requests that the usual times are of; 0: no baseline
    verdict: VerdictView
    ruled_out: list[RuledOutView]  # the near ones first
    process: ProcessView | None
    engine: dict[str, Any] | None  # model.EngineFacts without its steps
    code: CodeView
    links: list[Link]


class Bin(msgspec.Struct, kw_only=True):
    """A bin of the latency histogram. ``upper_ms`` is null in the last one: it has no bound."""

    lower_ms: float
    upper_ms: float | None
    requests: int  # all, whether explained or not
    slow_by_cause: dict[str, int]  # those slow or failed, of the store; `MAX_CAUSES` causes and `OTHER`


class TailView(msgspec.Struct, kw_only=True):
    """The distribution of latency, over time, with its slow part by cause. Steps without requests have null quantiles.

    Quantiles are read from histograms of all requests: within a bucket they are interpolated.
    """

    services: list[str]
    service: str  # the one that it is of; empty: all
    step_ms: float
    times_unix_ms: list[float]  # when each step begins
    quantiles: dict[str, list[float | None]]  # p50, p90, p99 of latency, ms
    ttft_quantiles: dict[str, list[float | None]]
    counts: list[int]  # requests that ended, by step
    by_cause: dict[str, list[float]]  # ms of excess by step, greatest cause first, then `OTHER`
    by_cause_requests: dict[str, list[int]]  # slow and failed requests by step, the same causes
    histogram: list[Bin]
    requests: int
    slow: int
    failed: int
    partial: bool  # the time before the first histogram in the store is not counted


class Series(msgspec.Struct, kw_only=True):
    """A line of a chart of the host. ``group``: pressure, throttled, memory, cpu, load, probes, losses."""

    key: str
    group: str
    label: str
    unit: str  # ratio (0..1), ms/s, bytes, cores, 1/s, count
    values: list[float | None]  # null: not known then


class ProbeCost(msgspec.Struct, kw_only=True):
    """A probe: its state, and what it costs now."""

    name: str
    title: str
    state: str
    reason: str
    hits_per_s: float
    ns_per_hit: float
    core_ratio: float  # of one CPU
    events: int
    lost: int


class AgentUse(msgspec.Struct, kw_only=True):
    """What a process of the agent uses."""

    name: str  # collector, exporter
    tgid: int
    core_ratio: float | None  # of one CPU, since the sample before
    rss_bytes: int
    uptime_s: float


class SinkState(msgspec.Struct, kw_only=True):
    """Where findings go, and whether they arrive. ``state`` is empty when they do."""

    name: str
    state: str
    details: dict[str, Any]


class WatchedService(msgspec.Struct, kw_only=True):
    """A service that is watched, by how many processes, and how many CPUs its quota gives it."""

    service: str
    processes: int
    cpu_limit: float | None


class HostView(msgspec.Struct, kw_only=True):
    """The host: pressure, quotas, what the agent itself costs and loses.

    ``running``: a collector has told of itself within the last 30 s.
    """

    running: bool
    collector_unix_ms: float | None  # when it last did
    step_ms: float
    times_unix_ms: list[float]
    series: list[Series]
    probes: list[ProbeCost]
    agent: list[AgentUse]
    losses: list[Named]  # what was lost or dropped, by name, since the collectors in the store started
    sinks: list[SinkState]
    services: list[WatchedService]
    gpus: list[dict[str, Any]]
    gpu_state: str  # why ``gpus`` is empty
