"""What is known of an engine: its processes, its requests (jobs), its steps.

Times are CLOCK_MONOTONIC ns; 0 means not yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from whyspan.marks import Hello, Scheduled

#: Steps and outputs remembered of one job, the latest.
MAX_LISTED: Final = 4096


def _latest() -> deque[Any]:
    return deque(maxlen=MAX_LISTED)


class Client(NamedTuple):
    """The HTTP request a job came by, as far as the connection tells. Empty strings and 0 when not known."""

    trace_id: str = ""
    span_id: str = ""  # the caller's
    tgid: int = 0
    cookie: int = 0
    seq: int = 0
    start_ns: int = 0
    request_bytes: int = 0
    route: str = ""


NO_CLIENT: Final = Client()


class Preemption(NamedTuple):
    """A job lost its KV blocks: when, in which step, how many computed tokens, and who was given blocks then."""

    ts_ns: int
    step: int
    lost: int
    taker: int  # number of the job that got most blocks in that step; -1 nobody


@dataclass(slots=True, eq=False)
class Job:
    """One sequence at an engine core. ``number`` is the core's, valid while the core lives.

    ``admitted_ns``: the scheduler first gave it tokens. ``first_token_ns``, ``last_token_ns``: the core had them.
    ``cached_tokens``: found by prefix at its first admission. ``common_tokens``: the longest prefix it shares with
    an earlier prompt of this engine, in whole blocks. ``diverged_block``: the block at which it parts from the
    prompt most like it, -1 when there is none; ``alike_blocks`` equal ones come after that.
    """

    core: int  # tgid
    number: int
    engine_id: str
    request: str = ""  # the caller's id
    frontend: int = 0  # tgid
    frontend_tid: int = 0
    core_tid: int = 0
    trace_id: str = ""
    span_id: str = ""
    own_span_id: str = ""
    client: Client = NO_CLIENT
    arrived_ns: int = 0
    tokenised: tuple[int, int] = (0, 0)
    enqueued_ns: int = 0
    queued_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0
    delivered_ns: int = 0  # the front end had taken in its last output
    client_left_ns: int = 0  # the client was gone
    aborted_ns: int = 0
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    common_tokens: int = 0
    usual_tokens: int = 0  # what a prompt of its size in bytes has on its route; 0 not known
    diverged_block: int = -1
    alike_blocks: int = 0
    block_size: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    n: int = 1
    logprobs: int = 0
    prompt_logprobs: int = 0
    grammar: str = ""
    adapter: str = ""
    template: str = ""
    priority: int = 0
    blocks: int = 0  # KV blocks given to it and not taken back
    prefill_left: int = -1  # prompt tokens still to come; -1 before admission
    behind: int = 0  # tokens it had computed when it was preempted, until it has them again
    preemptions: list[Preemption] = field(default_factory=list)
    resumed: list[tuple[int, int]] = field(default_factory=list)  # (when, tokens to compute again)
    deferred: list[tuple[int, str]] = field(default_factory=list)  # (when, reason), changes only
    outputs: deque[tuple[int, int]] = field(
        default_factory=_latest
    )  # (begin, end) of the front end's work on them
    steps: deque[int] = field(default_factory=_latest)  # the numbers of those it was part of

    @property
    def trace(self) -> str:
        """The trace id, from the marks or from the connection."""
        return self.trace_id or self.client.trace_id

    @property
    def span(self) -> str:
        """The span a link may go to: the server's own, else the caller's."""
        return self.own_span_id or self.span_id or self.client.span_id

    @property
    def costly(self) -> bool:
        """Whether it asked for more per token than an ordinary request."""
        return bool(self.logprobs or self.prompt_logprobs or self.grammar or self.n > 1)

    @property
    def held(self) -> int:
        """KV blocks it holds, at least: those told of, and those that its tokens fill (a decode's are not told of)."""
        if not self.admitted_ns:
            return 0
        tokens = self.prompt_tokens + self.output_tokens
        return max(self.blocks, -(-tokens // self.block_size) if self.block_size else 0)

    @property
    def label(self) -> str:
        """A name for people: the caller's id, else the engine's."""
        return self.request or self.engine_id or f"number {self.number}"


class Counts(NamedTuple):
    """What is known of a step that names no requests.

    ``position``: of its first token in its sequence, which is how many were in the cache; -1 not known. ``shared``:
    sequences of several requests may be in it. ``first``: a call begins with it; ``whole``: it is all of one.
    ``called_ns``: when that call began, 0 not known. ``inferred``: its end. ``result``: of ``llama_decode``.
    """

    tokens: int
    sequences: int = 1
    prefill_tokens: int = 0
    position: int = -1
    context: int = 0
    shared: bool = False
    first: bool = False
    whole: bool = False
    inferred: bool = False
    result: int = 0
    called_ns: int = 0


class Execution(NamedTuple):
    """A worker's part of a step."""

    begin_ns: int
    end_ns: int
    tgid: int
    tid: int
    part: str
    graph: str
    tokens: int = 0
    padded: int = 0


@dataclass(slots=True, eq=False)
class StepRun:
    """One step of an engine core. A step in progress has ``done_ns`` 0.

    ``from_ns``..``done_ns`` is its own stretch of wall time: where steps overlap (a batch is made up while the one
    before runs), it begins with the end of that one.
    """

    core: int
    core_tid: int
    step: int
    begin_ns: int
    scheduled_ns: int
    sent_ns: int = 0
    wait_ns: int = 0
    got_ns: int = 0
    done_ns: int = 0
    from_ns: int = 0
    decodes: tuple[int, ...] = ()
    others: tuple[Scheduled, ...] = ()
    preempted: tuple[tuple[int, int], ...] = ()
    deferred: tuple[tuple[int, str], ...] = ()
    blocked: str = ""  # why the first one of the queue was passed over; empty when nobody was
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_free: int = 0
    kv_cached: int = 0
    evicted: int = 0
    tokens_out: int = 0
    drafted: int = 0
    accepted: int = 0
    executions: list[Execution] = field(default_factory=list)
    usual_ns: int = 0  # a plain decode step of such a batch at that time; 0 not known
    prompts: tuple[Scheduled, ...] = ()  # of ``others``, those that compute a prompt, or compute it again
    costly: tuple[int, ...] = ()  # numbers of the jobs in it that asked for more per token
    counts: Counts | None = (
        None  # of a step that names no requests; ``core_tid`` is then the thread that ran it
    )

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed, of all requests."""
        return self.counts.prefill_tokens if self.counts is not None else sum(s.tokens for s in self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens computed: a prompt's, and one for each sequence that decodes."""
        return self.counts.tokens if self.counts is not None else len(self.decodes) + self.prefill_tokens

    @property
    def wall_ns(self) -> int:
        """Its own stretch of wall time; 0 while it runs."""
        return self.done_ns - self.from_ns if self.done_ns else 0

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self.counts.sequences if self.counts is not None else len(self.decodes) + len(self.others)

    @property
    def empty(self) -> bool:
        """Whether nothing was scheduled: the model is not run."""
        return self.counts is None and not self.decodes and not self.others

    def has(self, number: int) -> bool:
        """Return whether a job takes part."""
        return number in self.decodes or any(s.number == number for s in self.others)

    def share(self, number: int) -> Scheduled | None:
        """Return a job's part of the step when it is more than one decoded token."""
        return next((s for s in self.others if s.number == number), None)


class StageRun(NamedTuple):
    """A stage of a process's start, or of a change at run time; ``again``: the same was done before."""

    name: str
    what: str
    begin_ns: int
    end_ns: int
    tgid: int
    tid: int
    again: bool = False


@dataclass(slots=True, eq=False)
class Instance:
    """A process of an engine that has spoken, and what it said of itself last."""

    tgid: int
    hello: Hello | None = None
    models: list[tuple[int, dict[str, str]]] = field(
        default_factory=list
    )  # (since when, which), changes only
    stages: list[StageRun] = field(default_factory=list)  # in order of their end
    last_ns: int = 0
    ended_ns: int = 0  # the process ended

    def model_at(self, ts_ns: int) -> dict[str, str]:
        """Return the identity of the model that was served at a moment; the first known one before that."""
        found = [model for since, model in self.models if since <= ts_ns]
        return dict(found[-1] if found else self.models[0][1]) if self.models else {}

    @property
    def state(self) -> str:
        """ok, degraded, off; or heard, when it speaks but has not said who it is."""
        return self.hello.state if self.hello is not None else "heard"
