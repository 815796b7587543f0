"""Marks: what an inference process, or a feed of one, says of its own requests, steps and cache.

A mark travels as (kind, JSON object) through the marker of ``whyspan_inproc`` and becomes a ``Mark`` here. The
kernel supplies time, thread and process; the body is the process's own claim and is not trusted: sizes, types and
ranges are checked, strings are cleaned, times are held to lie before the mark and not long before it, and nothing
in a body can name another process. A body that does not pass is dropped and counted.

Feeds (KV-cache events, forward-pass metrics, ``/metrics``) yield the same ``Mark`` with ``tid`` 0.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from whyspan.text import clean

#: Bytes of a body; the marker refuses longer ones, the probe cuts them off.
MAX_BODY: Final = 8192
#: A mark may tell of a start up to this long before itself (a cold start of a large model takes minutes).
MAX_SPAN_NS: Final = 3_600_000_000_000

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Ns = Annotated[int, Meta(ge=0, le=1 << 62)]
_Id = Annotated[str, Meta(max_length=128)]
_Name = Annotated[str, Meta(max_length=128)]
_Text = Annotated[str, Meta(max_length=256)]
_Trace = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
_Span = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]
_Numbers = Annotated[list[_Count], Meta(max_length=4096)]


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Fields at their default are omitted on the wire; unknown fields are ignored."""


class Hello(_Body, frozen=True):
    """Who speaks, and which hooks are in place. Sent when watching begins and again after each change.

    ``role``: frontend, core, worker, or server where one process is all. ``state``: ok, degraded (``missing`` says
    which hooks), off. ``config``: plain settings worth knowing (max_num_seqs, max_num_batched_tokens, block_size,
    num_blocks, max_model_len, chunked_prefill, batch_wait_ms, speculative_tokens ...), numbers as text too.
    ``model``: what a baseline depends on: name, revision, dtype, quantization, attention, each as text.
    """

    engine: _Name
    version: _Name = ""
    role: _Name = ""
    rank: _Count = 0
    state: _Name = "ok"
    missing: Annotated[list[_Name], Meta(max_length=64)] = []
    config: Annotated[dict[_Name, _Text], Meta(max_length=64)] = {}
    model: Annotated[dict[_Name, _Text], Meta(max_length=16)] = {}


class Arrived(_Body, frozen=True):
    """The front end's engine client took a request. ``request`` is the id by which its caller knows it.

    ``trace_id`` and ``span_id`` are the caller's (from ``traceparent``); ``own_span_id`` is the server's own span,
    where an OpenTelemetry SDK made one. ``client_port`` and ``server_port`` are those of the HTTP connection.
    """

    request: _Id
    trace_id: _Trace = ""
    span_id: _Span = ""
    own_span_id: _Span = ""
    request_id: _Id = ""  # x-request-id
    client_port: _Count = 0
    server_port: _Count = 0
    n: _Count = 1  # completions asked for
    max_tokens: _Count = 0
    logprobs: _Count = 0  # per output token, 0 none
    prompt_logprobs: _Count = 0
    grammar: _Name = ""  # json, regex, choice, grammar ... of structured output
    priority: int = 0
    adapter: _Name = ""  # LoRA
    template: _Name = ""  # tag of the prompt template, if allow-listed


class Tokenised(_Body, frozen=True):
    """The front end turned the prompt into tokens, from ``begin_ns`` to the mark's time."""

    request: _Id
    begin_ns: _Ns
    prompt_tokens: _Count = 0


class Enqueued(_Body, frozen=True):
    """The front end hands it to the engine. ``engine_id`` is the engine's id for it, one for each completion asked.

    ``number`` is the front end's short number for ``engine_id``, used in ``Output`` and ``Aborted``.
    """

    request: _Id
    engine_id: _Id
    number: _Count


class Queued(_Body, frozen=True):
    """The engine core put it in its waiting queue. ``number`` is the core's short number for ``engine_id``.

    ``chain`` and ``blocks`` have 8 hex digits for each of the first 256 whole blocks of the prompt: of the hash of
    everything up to the block's end, and of the block alone. Both are keyed with a secret that never leaves the
    process: they tell equal from different, and nothing about the text.
    """

    engine_id: _Id
    number: _Count
    prompt_tokens: _Count = 0
    trace_id: _Trace = ""
    priority: int = 0
    block_size: _Count = 0
    chain: Annotated[str, Meta(max_length=2048, pattern=r"^[0-9a-f]*\Z")] = ""
    blocks: Annotated[str, Meta(max_length=2048, pattern=r"^[0-9a-f]*\Z")] = ""


class Scheduled(msgspec.Struct, frozen=True, array_like=True):
    """One request of a step that is not a plain decode of one token.

    ``computed`` tokens were in the cache before the step, of them ``cached`` found by prefix when it was (re)admitted
    in this step, else 0. ``recomputed``: of ``tokens``, those that had been computed before a preemption.
    ``resumed``: re-admitted after a preemption in this step. ``left``: prompt tokens still to come after the step.
    """

    number: _Count
    tokens: _Count
    computed: _Count = 0
    cached: _Count = 0
    new_blocks: _Count = 0
    recomputed: _Count = 0
    resumed: bool = False
    left: _Count = 0


class Step(_Body, frozen=True):
    """A batch was made up: the scheduler ran from ``begin_ns`` to ``end_ns``. Sent at once, so that a step in
    progress is known. ``step`` counts from the engine's start.

    ``decodes``: numbers of the requests that get one token; ``others``: all else. ``preempted``: (number, computed
    tokens lost). ``deferred``: (number, reason) of waiting requests passed over: capacity, budget, grammar,
    remote_kv, throttled. KV blocks of the pool as after scheduling; ``evicted`` cached blocks overwritten since the
    step before. ``batch`` 0 ends nothing: an empty step. Long lists go on in marks with the same ``step`` and
    ``more`` set.
    """

    step: _Count
    begin_ns: _Ns
    end_ns: _Ns
    decodes: _Numbers = []
    others: Annotated[list[Scheduled], Meta(max_length=1024)] = []
    preempted: Annotated[list[tuple[_Count, _Count]], Meta(max_length=256)] = []
    deferred: Annotated[list[tuple[_Count, _Name]], Meta(max_length=64)] = []
    running: _Count = 0
    waiting: _Count = 0
    kv_used: _Count = 0
    kv_free: _Count = 0
    kv_cached: _Count = 0  # of the free ones, those that still hold a prefix
    evicted: _Count = 0
    more: bool = False


class StepDone(_Body, frozen=True):
    """The core has a step's result. It sent the batch off at ``sent_ns``, began to wait for the result at
    ``wait_ns``, had it at ``got_ns``, and had updated its state at the mark's time.

    ``finished``: (number, reason: stop, length, abort, error, repetition). ``drafted``/``accepted``: speculative
    tokens.
    """

    step: _Count
    sent_ns: _Ns
    wait_ns: _Ns
    got_ns: _Ns
    tokens: _Count = 0  # output tokens
    finished: Annotated[list[tuple[_Count, _Name]], Meta(max_length=256)] = []
    drafted: _Count = 0
    accepted: _Count = 0


class Executed(_Body, frozen=True):
    """A worker ran its part of a step from ``begin_ns`` to the mark's time, on the marking thread.

    ``part``: execute or sample. ``graph``: none, piecewise, full; empty when not known. ``padded``: tokens after
    padding to a captured size.
    """

    step: _Count
    begin_ns: _Ns
    part: _Name = "execute"
    tokens: _Count = 0
    requests: _Count = 0
    graph: _Name = ""
    padded: _Count = 0


class Output(_Body, frozen=True):
    """The front end took in the engine's output and detokenised it, from ``begin_ns`` to the mark's time.

    Numbers are those of ``Enqueued``; ``requests`` got tokens, ``finished`` are done.
    """

    begin_ns: _Ns
    requests: _Numbers = []
    finished: _Numbers = []


class Aborted(_Body, frozen=True):
    """Requests were given up. ``side``: frontend (its own numbers) or core (the core's numbers)."""

    side: _Name
    numbers: _Numbers


class Stage(_Body, frozen=True):
    """A stage of start-up or of a change at run time, from ``begin_ns`` to the mark's time.

    ``name``: import, device, load_model, weights, kv_cache, compile, capture, warmup, ready; at run time adapter,
    reload, compile, capture, sleep, wake. ``what`` names the object: an adapter, a function compiled.
    """

    name: _Name
    begin_ns: _Ns
    what: _Text = ""


class SpanOn(_Body, frozen=True):
    """An OpenTelemetry span started or ended on the marking thread. ``task``: number of the asyncio task, or 0."""

    trace_id: _Trace
    span_id: _Span
    end: bool = False
    name: _Name = ""
    parent_id: _Span = ""
    task: _Count = 0


class Generated(_Body, frozen=True):
    """transformers: one forward pass of ``generate`` or of continuous batching, or a whole call (``whole``).

    ``begin_ns`` to the mark's time on the marking thread. ``tokens`` processed; ``cached`` tokens in the cache
    before it; ``batch`` sequences. ``request`` in continuous batching.
    """

    begin_ns: _Ns
    tokens: _Count = 0
    cached: _Count = 0
    batch: _Count = 1
    whole: bool = False
    prefill: bool = False
    requests: Annotated[list[_Id], Meta(max_length=64)] = []


class CacheChanged(_Body, frozen=True):
    """transformers: the cache was cropped, reset, offloaded, evicted; or a paged cache's state (``op`` state).

    ``op`` of a paged cache also: denied (``request`` got no blocks for ``tokens`` more), restored (from the host).
    ``offloaded`` and ``evicted`` with a ``request``: it lost ``removed`` tokens, to the host or for good.
    """

    op: _Name
    tokens: _Count = 0  # left in the cache
    removed: _Count = 0
    used_blocks: _Count = 0
    free_blocks: _Count = 0
    cached_blocks: _Count = 0  # of the free ones, those that still hold a prefix
    request: _Id = ""


class Layers(_Body, frozen=True):
    """One sampled forward pass, layer by layer: (layer number, kind, ns); kind: layer, attention, mlp, moe.

    ``available`` false says why not in ``reason`` (compiled, captured in a graph).
    """

    begin_ns: _Ns = 0
    step: _Count = 0
    rows: Annotated[list[tuple[_Count, _Name, _Ns]], Meta(max_length=1024)] = []
    available: bool = True
    reason: _Text = ""


class KvBlocks(_Body, frozen=True):
    """A feed's batch of KV-cache events: blocks stored and removed, by medium and group; never a token.

    ``hashes`` holds the low 64 bits of up to 256 stored block hashes, ``removed_hashes`` those removed. A batch of
    more is several bodies, as is one whose order counts: a body means cleared, then removed, then stored.
    ``gap``: batches missed before it.
    """

    engine: _Name = ""
    rank: _Count = 0
    stored: _Count = 0
    stored_tokens: _Count = 0
    removed: _Count = 0
    cleared: _Count = 0
    block_size: _Count = 0
    medium: _Name = ""
    group: _Count = 0  # of KV-cache layers; each stores its own blocks of the same tokens
    hashes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=256)] = []
    removed_hashes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=256)] = []
    gap: _Count = 0
    replayed: bool = False


class Pass(_Body, frozen=True):
    """SGLang's forward-pass feed: one pass. ``wall_ns`` is its length; its end is the mark's time, roughly."""

    counter: _Count
    rank: _Count = 0
    wall_ns: _Ns = 0
    prefill_requests: _Count = 0
    prefill_tokens: _Count = 0
    prefill_kv_tokens: _Count = 0
    decode_requests: _Count = 0
    decode_kv_tokens: _Count = 0
    queued_requests: _Count = 0
    idle: bool = False
    gap: _Count = 0


class Gauges(_Body, frozen=True):
    """A low-rate sample of an engine's ``/metrics``, under names common to all engines (ratios 0..1).

    Names: running, waiting, waiting_capacity, waiting_deferred, kv_usage, prefix_queries, prefix_hits, preemptions,
    prompt_tokens, prompt_tokens_cached, generation_tokens, evicted_tokens, drafted, accepted. Counters as they stand.
    """

    engine: _Name
    values: Annotated[dict[_Name, float], Meta(max_length=64)]


class Health(_Body, frozen=True):
    """What an engine's health endpoint answered, and how long it took."""

    status: _Count  # HTTP status, 0 no answer
    took_ns: _Ns = 0


Body = (
    Hello
    | Arrived
    | Tokenised
    | Enqueued
    | Queued
    | Step
    | StepDone
    | Executed
    | Output
    | Aborted
    | Stage
    | SpanOn
    | Generated
    | CacheChanged
    | Layers
    | KvBlocks
    | Pass
    | Gauges
    | Health
)

#: The wire's kinds, in the marker's first argument. Numbers are never reused.
KINDS: Final[dict[int, type[Body]]] = {
    1: Hello,
    2: Arrived,
    3: Tokenised,
    4: Enqueued,
    5: Queued,
    6: Step,
    7: StepDone,
    8: Executed,
    9: Output,
    10: Aborted,
    11: Stage,
    12: SpanOn,
    13: Generated,
    14: CacheChanged,
    15: Layers,
}
_DECODERS: Final = {kind: msgspec.json.Decoder(body) for kind, body in KINDS.items()}
_TIMES: Final = ("begin_ns", "end_ns", "sent_ns", "wait_ns", "got_ns")


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A body with where and when, as the kernel has it. ``ts_ns`` is CLOCK_MONOTONIC; ``tid`` 0 of a feed."""

    ts_ns: int
    tid: int
    tgid: int
    body: Body


class BadMarkError(ValueError):
    """A body that does not pass; the message never quotes it."""


def decode(kind: int, payload: bytes, *, ts_ns: int, tid: int, tgid: int) -> Mark:
    """Return the mark that a process made.

    Args:
        kind: The marker's first argument.
        payload: A JSON object, at most ``MAX_BODY`` bytes.
        ts_ns: When, CLOCK_MONOTONIC.
        tid: The thread, as the kernel has it.
        tgid: The process.

    Raises:
        BadMarkError: unknown kind, or a body that does not pass.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise BadMarkError(f"unknown kind {kind}")
    if len(payload) > MAX_BODY:
        raise BadMarkError(f"{KINDS[kind].__name__}: {len(payload)} bytes")
    try:
        body = decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadMarkError(f"{KINDS[kind].__name__}: does not pass") from e
    return Mark(ts_ns, tid, tgid, _bounded(body, ts_ns))


def _bounded(body: Body, ts_ns: int) -> Body:
    """Hold times to the mark's own, in order, and clean every string."""
    changes: dict[str, object] = {}
    at = max(0, ts_ns - MAX_SPAN_NS)
    for name in _TIMES:
        value = getattr(body, name, None)
        if value is not None:
            held = min(max(value, at), ts_ns) if value else 0
            at = max(at, held)
            if held != value:
                changes[name] = held
    for name in body.__struct_fields__:
        value = getattr(body, name)
        tidy = _tidy(value)
        if tidy != value:
            changes[name] = tidy
    return msgspec.structs.replace(body, **changes) if changes else body


def _tidy(value: object) -> object:
    if isinstance(value, str):
        # No longer than it was: a body that passed once must pass again when a recording is read.
        return clean(value, max(len(value), 1))
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [_tidy(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_tidy(v) for v in value)
    if isinstance(value, dict):
        return {_tidy(k): _tidy(v) for k, v in value.items()}
    return value
