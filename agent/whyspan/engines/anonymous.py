"""Steps of engines that name no requests, and whose they were.

llama.cpp by uprobes, ``generate`` of transformers and SGLang's forward-pass feed tell when a step ran and how many
tokens were in it. A *call* is a row of steps of one thread that go on with the same sequence: one completion. Whose it
was follows from the requests that were open all the while, and from the critical path of the request that is asked
about; what does not follow stays unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from whyspan_probes.schema import Events, Schema

from whyspan import marks as m
from whyspan.engines.records import Counts, StepRun
from whyspan.facts import Lru
from whyspan.marks import Mark
from whyspan.model import Request

LLAMA, TRANSFORMERS, SGLANG = "llama.cpp", "transformers", "sglang"
#: So many tokens of a sequence in a step are a prompt; fewer, after others of it, may be drafted tokens.
PROMPT_TOKENS: Final = 16
#: Result of ``llama_decode`` that found no place for the batch. Source: llama.h
NO_SLOT: Final = 1
_END_INFERRED: Final = 0x80000000  # aux of llama_step
_MAX_THREADS: Final = 256  # of a process, remembered
_MAX_TURNS: Final = 2048  # requests of a process, remembered
_MAX_PROCESSES: Final = 512
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_NEVER: Final = 1 << 62


class Seen(NamedTuple):
    """One thing seen of a step: that it began (``begin_ns`` is 0), or that it ended."""

    ts_ns: int
    tid: int
    tgid: int
    engine: str
    begin_ns: int
    counts: Counts
    prompt: bool | None = None  # whether it computes a prompt; None: the tokens tell
    lane: int = 0  # what runs one step at a time beside the thread: a rank
    waiting: int = 0
    call_ends: bool = False  # a whole call has ended


def of_events(events: Events, schema: Schema) -> list[Seen]:
    """Return what the uprobes on llama.cpp saw, by time."""
    out = []
    for name in ("llama_step_start", "llama_step"):
        rows = schema.select(events, name)
        fields = rows.dtype.names or ()
        for values in rows.tolist():
            row = dict(zip(fields, values, strict=True))
            ended = name == "llama_step"
            result = row["aux"] if ended else 0
            counts = Counts(
                row["tokens"],
                max(row["sequences"], 1),
                position=row["position"],
                context=row["context"],
                shared=row["sequences"] > 1,
                inferred=result == _END_INFERRED,
                result=0 if result == _END_INFERRED else result - (1 << 32) * (result >> 31),
            )
            begin_ns = row["begin_ns"] if ended else 0
            out.append(Seen(row["ts_ns"], row["tid"], row["tgid"], LLAMA, begin_ns, counts))
    out.sort(key=lambda s: s.ts_ns)
    return out


def of_generated(mark: Mark, body: m.Generated) -> Seen | None:
    """Return what transformers told of a pass or of a call; None where it is neither (a whole request of a batch)."""
    if body.whole and body.requests:
        return None
    counts = Counts(
        body.tokens, max(body.batch, 1), position=body.cached, shared=bool(body.requests), whole=body.whole
    )
    return Seen(
        *(mark.ts_ns, mark.tid, mark.tgid, TRANSFORMERS, body.begin_ns, counts),
        prompt=body.prefill,
        call_ends=body.whole,
    )


def of_pass(mark: Mark, body: m.Pass) -> Seen | None:
    """Return what SGLang's feed told of a forward pass; None of a heartbeat."""
    sequences = body.prefill_requests + body.decode_requests
    if body.idle or not sequences:
        return None
    tokens = body.prefill_tokens + body.decode_requests
    counts = Counts(tokens, sequences, body.prefill_tokens, shared=True)
    begin_ns = max(mark.ts_ns - body.wall_ns, 0)
    return Seen(
        *(mark.ts_ns, 0, mark.tgid, SGLANG, begin_ns, counts, body.prefill_tokens > 0),
        lane=body.rank,
        waiting=body.queued_requests,
    )


class Runs:
    """The steps of one process, put together from what was seen. ``kv`` is (used, free, cached) blocks at the last."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, StepRun] = {}  # by thread
        self._last: Lru[tuple[int, int], StepRun] = Lru(_MAX_THREADS)  # by thread and lane
        self._over: Lru[int, int] = Lru(_MAX_THREADS)  # threads whose last call has ended
        self.kv = (0, 0, 0)

    def take(self, seen: Seen) -> tuple[StepRun | None, list[StepRun]]:
        """Take in what was seen; return the step that is new by it, and the steps that ended by it."""
        ended = self._close(seen)
        begin_ns = seen.begin_ns or seen.ts_ns
        same = self._open.pop(seen.tid, None)  # of another beginning it would be closed by now
        if same is not None:
            self._end(same, seen.ts_ns, seen.counts)
            return None, [*ended, same]
        last = self._last.get((seen.tid, seen.lane))
        if seen.call_ends:
            self._over.put(seen.tid, 1)
            if last is not None and last.begin_ns >= begin_ns:
                return None, ended  # its passes were seen
        self._number += 1
        step = StepRun(
            seen.tgid,
            seen.tid,
            self._number,
            begin_ns,
            begin_ns,
            from_ns=max(begin_ns, last.done_ns if last is not None else 0),
            running=seen.counts.sequences,
            waiting=seen.waiting,
            kv_used=self.kv[0],
            kv_free=self.kv[1],
            kv_cached=self.kv[2],
            counts=self._told(seen, last),
        )
        self._last.put((seen.tid, seen.lane), step)
        if not seen.call_ends:
            self._over.pop(seen.tid)
        if seen.begin_ns:
            self._end(step, seen.ts_ns, seen.counts)
            return step, [*ended, step]
        self._open[seen.tid] = step
        return step, ended

    def _close(self, seen: Seen) -> list[StepRun]:
        """End the steps whose end was lost: their thread, or what they ran on, is at another one."""
        out = []
        for tid, step in list(self._open.items()):
            if seen.begin_ns == step.begin_ns and tid == seen.tid:
                continue
            on = step.counts.context if step.counts is not None else 0
            if tid == seen.tid or (on and on == seen.counts.context):
                counts = seen.counts._replace(inferred=True, result=0)
                self._end(step, max(seen.begin_ns or seen.ts_ns, step.begin_ns), counts)
                del self._open[tid]
                out.append(step)
        return out

    @staticmethod
    def _end(step: StepRun, ts_ns: int, told: Counts) -> None:
        assert step.counts is not None
        step.counts = step.counts._replace(inferred=told.inferred, result=told.result)
        step.done_ns = step.sent_ns = step.got_ns = max(ts_ns, step.from_ns)

    def _told(self, seen: Seen, last: StepRun | None) -> Counts:
        """Return the counts, with which of the tokens are a prompt's, and whether a call begins."""
        now = seen.counts
        if seen.lane or seen.tid == 0 or now.whole:
            return now._replace(first=now.whole)
        before = None if self._over.get(seen.tid) is not None or last is None else last.counts
        if seen.prompt is not None:
            first = before is None or (seen.prompt and not before.prefill_tokens)
            return now._replace(first=first, prefill_tokens=now.tokens if seen.prompt else 0)
        if now.shared:  # those that decode, one token each, and one or more prompts
            more = now.tokens - now.sequences
            return now._replace(prefill_tokens=more if more >= PROMPT_TOKENS else 0)
        first = before is None or not _goes_on(before, now)
        in_prompt = before is not None and before.prefill_tokens > 0 and now.tokens > 1
        prompt = first or in_prompt or now.tokens >= PROMPT_TOKENS
        return now._replace(first=first, prefill_tokens=now.tokens if prompt else 0)


def _goes_on(before: Counts, now: Counts) -> bool:
    """Whether a step computes what follows in the sequence of the step before it on its thread."""
    if before.context != now.context or before.shared:
        return False
    if now.tokens >= PROMPT_TOKENS and not before.prefill_tokens:
        return False
    if now.position < 0 or before.position < 0:
        return True
    behind = before.position + before.tokens
    if now.position == behind:
        return True
    # Drafted tokens that were refused are computed over.
    return now.tokens < PROMPT_TOKENS and before.position < now.position < behind


@dataclass(slots=True, eq=False)
class Turn:
    """An HTTP request of a process that may have an engine's work in it. ``end_ns`` 0: it goes on."""

    trace_id: str
    span_id: str
    label: str
    key: tuple[int, int]  # cookie and seq
    start_ns: int
    end_ns: int = 0

    def all_through(self, begin_ns: int, end_ns: int) -> bool:
        """Return whether it was open from one moment to another; *end_ns* 0: to now."""
        return self.start_ns <= begin_ns and (not self.end_ns or 0 < end_ns <= self.end_ns)


class Turns:
    """The requests of each process, in order of their start."""

    def __init__(self) -> None:
        self._by_process: Lru[int, deque[Turn]] = Lru(_MAX_PROCESSES)
        self._by_key: Lru[tuple[int, int], Turn] = Lru(8 * _MAX_TURNS)

    def begun(self, r: Request) -> None:
        """Take in a request whose head was read. One without a body has no prompt."""
        if r.method in _WITHOUT_BODY:
            return
        key = r.cookie, r.seq
        turn = Turn(r.trace_id, r.parent_span_id, r.request_id or r.trace_id, key, r.start_ns)
        known = self._by_process.get(r.tgid)
        if known is None:
            known = deque(maxlen=_MAX_TURNS)
            self._by_process.put(r.tgid, known)
        known.append(turn)
        self._by_key.put(key, turn)

    def ended(self, r: Request) -> None:
        """Take in the end of a request; one whose end is not known might be anybody's: it is left out."""
        turn = self._by_key.get((r.cookie, r.seq))
        if turn is not None:
            turn.end_ns = r.end_ns or turn.start_ns

    def of(self, tgid: int, start_ns: int, end_ns: int) -> list[Turn]:
        """Return the requests of a process that overlap an interval."""
        found = self._by_process.get(tgid) or ()
        return [t for t in found if t.start_ns < end_ns and (not t.end_ns or t.end_ns > start_ns)]

    def get(self, key: tuple[int, int]) -> Turn | None:
        """Return a request by cookie and seq."""
        return self._by_key.get(key)


@dataclass(slots=True, eq=False)
class Call:
    """One completion. ``end_ns`` 0: in progress. ``owner`` None: not known whose it is.

    ``inferred``: others might have been served too; the owner is the one that was answered first.
    """

    tid: int
    steps: list[StepRun]
    begin_ns: int
    end_ns: int
    shared: bool = False
    owner: Turn | None = None
    inferred: bool = False

    @property
    def ns(self) -> int:
        """How long it took; 0 while it runs."""
        return self.end_ns - self.begin_ns if self.end_ns else 0

    def overlaps(self, start_ns: int, end_ns: int) -> bool:
        """Return whether it has part of an interval."""
        return self.begin_ns < end_ns and (not self.end_ns or self.end_ns > start_ns)


class OnPath(NamedTuple):
    """A stretch of a critical path."""

    start_ns: int
    end_ns: int
    tid: int


def calls(steps: Iterable[StepRun], turns: Sequence[Turn]) -> list[Call]:
    """Return steps, in order of their beginning, as calls, in order of theirs."""
    ends = sorted(t.end_ns for t in turns if t.end_ns)
    out: list[Call] = []
    latest: dict[int, Call] = {}
    for step in steps:
        counts = step.counts
        if counts is None or not step.core_tid:
            continue
        call = latest.get(step.core_tid)
        if (
            call is None
            or counts.first
            or counts.shared
            or call.shared
            or any(call.end_ns <= t <= step.begin_ns for t in ends)
        ):
            call = Call(step.core_tid, [], step.begin_ns, 0, counts.shared)
            latest[step.core_tid] = call
            out.append(call)
        call.steps.append(step)
        call.end_ns = step.done_ns
    return out


def anchor(found: Sequence[Call], path: Sequence[OnPath], turn: Turn) -> Call | None:
    """Return the call that the critical path of an answered request comes from: the last one before its end."""
    last: dict[int, list[Call]] = {}
    for call in found:
        if turn.all_through(call.begin_ns, call.end_ns) and call.end_ns:
            last.setdefault(call.tid, []).append(call)
    for p in reversed(path):
        for call in reversed(last.get(p.tid, ())):
            if call.overlaps(p.start_ns, p.end_ns):
                return call
    return None


def assign(found: Sequence[Call], turns: Sequence[Turn], mine: Turn | None, own: Call | None) -> None:
    """Give each call its owner, as far as it can be known.

    A call belongs to a request that was open all the while. Of several it is the one answered next, and of those not
    answered yet the oldest; a request has no two calls at a time. *own* is known to be of *mine*, and its last.
    """
    taken: list[Call] = []
    for call in sorted(found, key=lambda c: (c.end_ns or _NEVER, c.begin_ns)):
        able = [t for t in turns if t.all_through(call.begin_ns, call.end_ns)]
        if call is own:
            call.owner = mine
            taken.append(call)
            continue
        if own is not None and (call.begin_ns >= own.begin_ns or call.overlaps(own.begin_ns, own.end_ns)):
            able = [t for t in able if t is not mine]
        call.inferred = len(able) > 1
        if call.shared:
            call.owner = able[0] if len(able) == 1 else None
            continue
        busy = {
            id(c.owner)
            for c in taken[-_MAX_THREADS:]
            if c.tid != call.tid and c.overlaps(call.begin_ns, call.end_ns or _NEVER)
        }
        free = [t for t in able if id(t) not in busy]
        call.owner = min(free, key=lambda t: (t.end_ns or _NEVER, t.start_ns), default=None)
        if call.owner is not None:
            taken.append(call)
