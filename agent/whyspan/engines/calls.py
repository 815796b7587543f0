"""Whose the steps were that name no requests.

A *call* is a row of steps of one thread that go on with the same sequence: one completion. Whose it was follows from
the requests that were open all the while, and from the critical path of the request that is asked about; what does not
follow stays unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from whyspan.engines.anonymous import PROMPT_TOKENS
from whyspan.engines.records import Counts, StepRun
from whyspan.lru import Lru
from whyspan.model import Request

_MAX_TURNS: Final = 2048  # requests of a process, remembered
_MAX_PROCESSES: Final = 512
_MAX_AT_ONCE: Final = 256
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_NEVER: Final = 1 << 62


@dataclass(slots=True, eq=False)
class Turn:
    """An HTTP request of a process that may have an engine's work in it. ``end_ns`` 0: it goes on."""

    trace_id: str
    span_id: str
    label: str
    key: tuple[int, int]  # cookie and seq
    start_ns: int
    end_ns: int = 0
    route: str = ""

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
        label = r.request_id or r.trace_id
        turn = Turn(r.trace_id, r.parent_span_id, label, key, r.start_ns, route=r.route)
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

    @property
    def called_ns(self) -> int:
        """When it was begun, as far as that is known: at the latest with its first step."""
        counts = self.steps[0].counts if self.steps else None
        return counts.called_ns if counts is not None and counts.called_ns else self.begin_ns

    @property
    def context(self) -> int:
        """What it ran on, that can do one at a time; 0 not known."""
        counts = self.steps[0].counts if self.steps else None
        return counts.context if counts is not None else 0

    @property
    def prompt(self) -> list[StepRun]:
        """The steps that computed its prompt. A short one may look like drafted tokens, but the first always is one."""
        found = [s for s in self.steps if s.prefill_tokens]
        return found or (self.steps[:1] if self.context else [])

    def overlaps(self, start_ns: int, end_ns: int) -> bool:
        """Return whether it has part of an interval."""
        return self.begin_ns < end_ns and (not self.end_ns or self.end_ns > start_ns)


class Behind(NamedTuple):
    """A request waited in this interval for another call to end."""

    start_ns: int
    end_ns: int
    call: Call
    inferred: bool


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
            or (_may_be_next(counts) and any(call.end_ns <= t <= step.begin_ns for t in ends))
        ):
            call = Call(step.core_tid, [], step.begin_ns, 0, counts.shared)
            latest[step.core_tid] = call
            out.append(call)
        call.steps.append(step)
        call.end_ns = step.done_ns
    for call in latest.values():
        if not _over(call):
            call.end_ns = 0
    return out


def _over(call: Call) -> bool:
    """Whether the latest call of a thread may have ended: it has not, if its engine tells of ends and told of none."""
    counts = call.steps[-1].counts
    return counts is None or bool(counts.context or counts.called_ns) or counts.whole or counts.shared


def _may_be_next(counts: Counts) -> bool:
    """Whether a step of llama.cpp that goes on with a sequence may do so for the next, short prompt of a conversation,
    or hold drafted tokens.
    """
    return bool(counts.context) and 1 < counts.tokens < PROMPT_TOKENS and not counts.prefill_tokens


def anchor(found: Sequence[Call], path: Sequence[OnPath], turn: Turn) -> Call | None:
    """Return the call that the critical path of an answered request comes from: the last one before its end."""
    last: dict[int, list[Call]] = {}
    for call in found:
        if turn.all_through(call.begin_ns, call.end_ns) and call.end_ns and not call.shared:
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
    for call in found:
        call.owner, call.inferred = None, False
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
            for c in taken[-_MAX_AT_ONCE:]
            if c.tid != call.tid and c.overlaps(call.begin_ns, call.end_ns or _NEVER)
        }
        free = [t for t in able if id(t) not in busy]
        call.owner = min(free, key=lambda t: (t.end_ns or _NEVER, t.start_ns), default=None)
        if call.owner is not None:
            taken.append(call)


def contradicted(found: Sequence[Call], turns: Sequence[Turn], mine: Turn, own: Call) -> bool:
    """Return whether a call is rather that of a request answered earlier: unless that has another one at the same time,
    what served *mine* was not seen, and its path is that of its wait.
    """
    earlier = [t for t in turns if t.all_through(own.begin_ns, own.end_ns) and 0 < t.end_ns < mine.end_ns]
    first = min(earlier, key=lambda t: t.end_ns, default=None)
    return first is not None and not any(
        c.owner is first and c is not own and c.overlaps(own.begin_ns, own.end_ns) for c in found
    )
