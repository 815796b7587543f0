"""Causes that an engine's marks place in time: each is a list of intervals, claimed where the path passes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import ClassVar, Final, NamedTuple

from whyspan.causes.context import MS, Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.engines import EngineView, Job, StepRun
from whyspan.engines.calls import Turn
from whyspan.model import Culprit
from whyspan.timeline import RUNNING, UNKNOWN_STATE

NO_MARKS: Final = "the engine's steps are not known: no marks from it"
NO_NAMES: Final = "the engine's steps do not tell: they name no requests"
#: A step is long when it takes this much more than a plain decode step of the batch, and at least a millisecond.
LONG_RATIO: Final = 1.5
LONG_NS: Final = 1_000_000


class During(NamedTuple):
    """An interval in which a cause held the request up."""

    start_ns: int
    end_ns: int
    detail: str = ""
    culprit: Culprit | None = None
    inferred: bool = False


class Stretches(list[During]):
    """Intervals in order and without overlap, to be looked up by time."""

    def __init__(self, found: Iterable[During]) -> None:
        super().__init__(found)
        self._starts = [d.start_ns for d in self]

    def first(self, start_ns: int, end_ns: int) -> During | None:
        """Return the first that overlaps (start, end)."""
        i = bisect_right(self._starts, start_ns)
        if i and self[i - 1].end_ns > start_ns:
            return self[i - 1]
        return self[i] if i < len(self) and self._starts[i] < end_ns else None


def tidy(found: Iterable[During]) -> Stretches:
    """Return intervals in order and without overlap; the earlier one keeps what two share."""
    out: list[During] = []
    for d in sorted(found, key=lambda d: (d.start_ns, d.end_ns)):
        start = max(d.start_ns, out[-1].end_ns) if out else d.start_ns
        if start < d.end_ns:
            out.append(d._replace(start_ns=start))
    return Stretches(out)


_NONE: Final = Stretches(())


class DuringRule:
    """Base of the rules that claim by intervals. A subclass has ``id``, ``title``, ``neighbours``, ``fix``, ``rank``,
    and ``find``; ``nothing`` says in words what was looked for. ``anonymous``: it can tell something from steps that
    name no requests.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    neighbours: ClassVar[tuple[str, ...]]
    fix: ClassVar[str]
    rank: ClassVar[int]
    nothing: ClassVar[str]
    anonymous: ClassVar[bool] = False

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Return the intervals, in any order."""
        raise NotImplementedError

    def during(self, ctx: Context) -> Stretches:
        """Return the intervals of the request's engine, in order; none without marks."""
        engine = ctx.engine
        if engine is None or not engine.core or (engine.anonymous and not self.anonymous):
            return _NONE
        return ctx.memo(self.id, lambda: tidy(self.find(engine, ctx)))

    def applies(self, ctx: Context) -> bool:
        """Return whether there are any intervals."""
        return bool(self.during(ctx))

    def takes(self, segment: PathSegment, ctx: Context) -> bool:
        """Return whether the rule may claim a segment that lies in one of its intervals.

        What the front end does on a CPU is its own time, whatever the engine does meanwhile. Of a request that the
        engine does not know only what its path has of the engine's threads is the engine's.
        """
        if segment.state == UNKNOWN_STATE or ctx.engine is None:
            return False
        if ctx.engine.anonymous:
            return self.takes_unnamed(segment, ctx, ctx.engine)
        if segment.tgid != ctx.request.tgid and ctx.engine.known:
            return True
        if ctx.engine.known and segment.state != RUNNING:
            return True
        return ctx.engine.handoffs.knows(segment.tid)

    def takes_unnamed(self, segment: PathSegment, ctx: Context, engine: EngineView) -> bool:
        """The same where steps name no requests. Often the engine's threads are the server's own."""
        if segment.tid in engine.step_tids or segment.tgid == engine.core != ctx.request.tgid:
            return True
        if not engine.own_calls and not engine.behind and not engine.fed:
            return False
        return segment.state != RUNNING or not ctx.serves(segment.tid)

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim the part of a segment that lies in one of the intervals."""
        found = self.during(ctx)
        if not found or not self.takes(segment, ctx):
            return None
        d = found.first(segment.start_ns, segment.end_ns)
        if d is None:
            return None
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, d.inferred, start_ns=lo, end_ns=hi)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return what was looked for and how much of it there was."""
        if ctx.engine is None or not ctx.engine.core:
            return NO_MARKS
        if ctx.engine.anonymous and not self.anonymous:
            return NO_NAMES
        found = self.during(ctx)
        if not found:
            return self.nothing
        total = sum(d.end_ns - d.start_ns for d in found) / MS
        return f"{total:.1f} ms of it beside the request, off the path or another cause's"


def request_culprit(job: Job, detail: str) -> Culprit:
    """Return another request as the culprit; its trace is linked where its ids are known."""
    return Culprit(
        kind="request", name=job.label, tgid=job.core, detail=detail, trace_id=job.trace, span_id=job.span
    )


def turn_culprit(turn: Turn | None, engine: EngineView, detail: str) -> Culprit:
    """Return the request whose steps they were; the engine where that is not known."""
    if turn is None:
        name = engine.facts.comm(engine.core) or "engine"
        return Culprit(kind="process", name=name, tgid=engine.core, detail=detail)
    return Culprit(
        kind="request",
        name=turn.label,
        tgid=engine.core,
        detail=detail,
        trace_id=turn.trace_id,
        span_id=turn.span_id,
    )


def long_by_ns(step: StepRun, end_ns: int, plain: int) -> int:
    """Return by how much a step is longer than *plain* ns; 0 when it is not long. One in progress ends at *end_ns*."""
    wall = step.wall_ns or max(end_ns - max(step.from_ns, step.begin_ns), 0)
    excess = wall - plain
    return excess if excess >= max(LONG_NS, int(plain * (LONG_RATIO - 1))) else 0


def last_part(step: StepRun, ns: int, end_ns: int) -> tuple[int, int]:
    """Return the last *ns* of a step's own stretch as (start, end)."""
    end = step.done_ns or end_ns
    return max(end - ns, step.from_ns), end
