"""A request whose engine's steps name nobody: which of them served it, and whose it waited for."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Final

from whyspan.engines.calls import Behind, Call, OnPath, Turn, anchor, assign, calls, contradicted
from whyspan.engines.records import Job, StepRun
from whyspan.engines.table import EngineTable
from whyspan.model import Request

#: Steps looked at beside a request, at most.
MAX_STEPS: Final = 5000
_MARGIN_NS: Final = 2_000_000_000


class Unnamed:
    """Base of ``EngineView``. ``path``: where the request's critical path passes threads that ran steps."""

    table: EngineTable
    request: Request
    jobs: list[Job]
    core: int
    path: tuple[OnPath, ...]

    @cached_property
    def steps(self) -> list[StepRun]:
        """Steps of the core that overlap the request, a little before it included."""
        if not self.core:
            return []
        r = self.request
        found = self.table.steps(self.core, r.start_ns - _MARGIN_NS, r.end_ns)[-MAX_STEPS:]
        if self.anonymous:  # each thread is at its own
            return found
        # Workers take batches one by one: of those in progress only the oldest is being worked at.
        first = next((i for i, s in enumerate(found) if not s.done_ns), len(found))
        return found[: first + 1]

    @cached_property
    def anonymous(self) -> bool:
        """Whether the engine's steps do not tell which requests they serve."""
        return not self.jobs and self.table.anonymous(self.core)

    @cached_property
    def fed(self) -> bool:
        """Whether all that is known of steps comes from a feed, which names no threads either."""
        return self.anonymous and bool(self.steps) and not self.step_tids

    @cached_property
    def turn(self) -> Turn | None:
        """The request among those of its process; None when it can have no work in an engine."""
        return self.table.turns.get((self.request.cookie, self.request.seq))

    @cached_property
    def answered(self) -> bool:
        """Whether this is the whole request, to its end."""
        return self.turn is not None and 0 < self.turn.end_ns <= self.request.end_ns

    @cached_property
    def calls(self) -> list[Call]:
        """The rows of steps beside the request with whose they were, in order of their beginning."""
        if not self.anonymous:
            return []
        turns = self.table.turns.of(self.core, self.request.start_ns - _MARGIN_NS, self.request.end_ns)
        found = calls(self.steps, turns)
        if self.turn is None or not self.answered:
            assign(found, turns, None, None)
            return found
        own = anchor(found, self.path, self.turn)
        assign(found, turns, self.turn, own)
        if own is not None and contradicted(found, turns, self.turn, own):
            assign(found, turns, self.turn, None)
        return found

    @cached_property
    def own_calls(self) -> list[Call]:
        """The calls that served the request; none where they may not be all, or, once it is answered, its path does
        not confirm what others might have been served by too.
        """
        r = self.request
        mine = [c for c in self.calls if c.owner is not None and c.owner is self.turn]
        if self.answered and mine and mine[-1].inferred:
            return []
        unknown = any(c.shared and c.owner is None and c.overlaps(r.start_ns, r.end_ns) for c in self.calls)
        return [] if unknown else mine

    @cached_property
    def before(self) -> list[Call]:
        """The other calls that the request waited for, in order: those that had to end before its first could begin.

        They ran on what it needs too, the thread or the context, or its critical path comes from them.
        """
        if not self.own_calls:
            return []
        first, since = self.own_calls[0], self.request.recv_ns or self.request.start_ns
        found = [c for c in self.calls if c.owner is not self.turn and since < c.end_ns <= first.called_ns]
        return [
            c
            for c in found
            if c.tid == first.tid
            or (c.context and c.context == first.context)
            or self.passes(c.tid, max(c.begin_ns, since), c.end_ns)
        ]

    @cached_property
    def behind(self) -> list[Behind]:
        """When it waited for others' calls to end, in order.

        Of one that is still open, and has no steps yet, it is inferred: where one request is served at a time, one of
        the same route is taken to wait for those that came before it. Not where steps are told of at their end: it may
        be in its first.
        """
        since = max(self.request.recv_ns, self.request.start_ns)
        if self.own_calls:
            first = self.own_calls[0].begin_ns
            return [
                Behind(max(c.begin_ns, since), min(c.end_ns, first), c, c.inferred and c.owner is None)
                for c in self.before
            ]
        turn, end_ns = self.turn, self.request.end_ns
        at_once = any(
            b.tid != a.tid and b.overlaps(a.begin_ns, a.end_ns or end_ns) for a, b in pairwise(self.calls)
        )
        if turn is None or self.answered or at_once:
            return []
        return [
            Behind(max(c.begin_ns, since), min(c.end_ns or end_ns, end_ns), c, True)
            for c in self.calls
            if c.context
            and c.owner is not None
            and c.owner is not turn
            and c.owner.route == turn.route
            and c.owner.start_ns <= turn.start_ns
            and c.overlaps(since, end_ns)
        ]

    def queued_until(self) -> tuple[int, int]:
        """Return until when a feed tells of waiting requests without a break since the request came, and of how many
        at most. It may have been one of them, until its first byte out at the latest.
        """
        r, most = self.request, 0
        until, limit = r.start_ns, r.first_ns or r.end_ns
        for step in self.steps:
            if step.done_ns <= r.start_ns:
                continue
            if step.begin_ns >= limit or not step.waiting:
                break
            until, most = min(step.done_ns, limit), max(most, step.waiting)
        return until, most

    def passes(self, tid: int, start_ns: int, end_ns: int) -> bool:
        """Return whether the critical path is on a thread in an interval."""
        return any(p.tid == tid and p.start_ns < end_ns and p.end_ns > start_ns for p in self.path)

    @cached_property
    def step_tids(self) -> frozenset[int]:
        """The threads that ran steps beside the request."""
        return frozenset(s.core_tid for s in self.steps) - {0}
