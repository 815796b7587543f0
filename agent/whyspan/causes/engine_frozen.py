"""``engine.frozen``: the engine made no progress although it had work, and its health said nothing of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan import syscalls
from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, DuringRule
from whyspan.critical_path import STOPPED, PathSegment
from whyspan.engines import EngineTable, EngineView
from whyspan.engines.records import StepRun
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, RUNNING

#: No step ends for so long, and so many times what such a step usually takes.
FROZEN_NS: Final = 2_000_000_000
FROZEN_RATIO: Final = 10
#: A health answer this old still counts.
_HEALTH_NS: Final = 30_000_000_000
_OK: Final = 200


def frozen_since(table: EngineTable, core: int, now_ns: int) -> int:
    """Return since when an engine core with work has not ended a step, if that is unusually long; else 0."""
    since = table.working_since(core)
    if not since or now_ns - since < FROZEN_NS:
        return 0
    step = table.in_progress(core)
    if step is not None:
        since = max(since, step.begin_ns)
    return since if now_ns - since >= _limit(table, core, step) else 0


def _limit(table: EngineTable, core: int, step: StepRun | None) -> int:
    """How long nothing may happen; *step*: the one in progress, if one is."""
    usual = table.usual(core)
    expected = usual.expected(step) if usual is not None and step is not None else 0
    # A prompt of unknown cost may well take a while, as may the very first step.
    new = bool(step.prefill_tokens) if step is not None else table.last_step(core) is None
    patience = 5 * FROZEN_NS if new and not expected else FROZEN_NS
    return max(patience, FROZEN_RATIO * expected)


class _Frozen(DuringRule):
    id = "engine.frozen"
    title = "while the engine made no progress although it had work"
    neighbours = ("engine.queueing", "engine.straggler")
    fix = (
        "Try a liveness check that asks for progress (steps that end), not only for an answer; take the stacks of the "
        "thread named before a restart destroys them."
    )
    rank = 56
    nothing = "steps went on ending while the request was with the engine"
    anonymous = True

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the stretches without the end of a step, far beyond what such a step takes."""
        r = engine.request
        # Between two steps it has nothing to do, unless this request is with it.
        job = engine.job
        since = job.queued_ns if job is not None else r.end_ns
        until = min(job.finished_ns or r.end_ns, r.end_ns) if job is not None else r.end_ns
        ended = engine.table.ended_ns(engine.core)
        at, last = 0, None
        for step in engine.steps:
            if last is not None:
                idle = max(at, since), min(step.begin_ns, until)
                yield from self._stretch(engine, ctx, (last, None), idle)
            lo, hi = max(step.from_ns, at), min(step.done_ns or r.end_ns, r.end_ns)
            yield from self._stretch(engine, ctx, (last or step, step), (lo, hi))
            at, last = step.done_ns or r.end_ns, step
        if last is not None and not ended:
            yield from self._stretch(engine, ctx, (last, None), (max(at, since), until))

    def takes_unnamed(self, segment: PathSegment, ctx: Context, engine: EngineView) -> bool:
        """A step that does not end holds up every request that may want the engine, whosever it is."""
        if engine.turn is not None and segment.state != RUNNING:
            return True
        return super().takes_unnamed(segment, ctx, engine)

    def _stretch(
        self,
        engine: EngineView,
        ctx: Context,
        steps: tuple[StepRun, StepRun | None],
        during: tuple[int, int],
    ) -> Iterable[During]:
        """*steps*: the last one that ended, and the one in progress."""
        lo, hi = during
        last, step = steps
        if hi - lo >= FROZEN_NS and hi - lo >= _limit(engine.table, engine.core, step):
            who = self._culprit(engine, ctx, step or last, during)
            # A request that came late met the same standstill.
            yield During(max(lo, engine.request.start_ns), hi, self._detail(engine, last, hi), who)

    @staticmethod
    def _detail(engine: EngineView, step: StepRun, at_ns: int) -> str:
        text = f"no step ended after number {step.step}, {step.running} requests running"
        seen = engine.table.health.get(engine.request.tgid)
        if seen is not None and seen[1].status == _OK and at_ns - seen[0] < _HEALTH_NS:
            text += "; health answered 200"
        return text

    @staticmethod
    def _culprit(engine: EngineView, ctx: Context, step: StepRun, during: tuple[int, int]) -> Culprit:
        """The thread of the engine that did not run; when all did, the core, which then spins or computes."""
        lo, hi = during
        workers = {
            (e.tid, e.tgid): None for s in engine.steps[-8:] for e in s.executions if e.tid != step.core_tid
        }
        at_rest: list[Culprit] = []
        for tid, tgid in [*workers, (step.core_tid, step.core)]:
            # At the end of a stretch that ended everybody is at work again.
            interval = ctx.timelines.longer(tid).before(lo + (hi - lo) * 3 // 4)
            if interval.state == RUNNING or interval.start_ns > lo + (hi - lo) // 2:
                continue
            how = f"not running from {(max(interval.start_ns, lo) - ctx.request.start_ns) / MS:.0f} ms on"
            wait = ctx.timelines.thread(tid).wait(interval.at) if interval.state == BLOCKED else None
            stopped = wait is not None and bool(wait.prev_state & STOPPED)
            if wait is not None:
                call = syscalls.name(wait.syscall_nr) or "the kernel"
                how += ", stopped by a signal" if stopped else f", in {call}"
            who = Culprit(kind="thread", name=ctx.thread_label(tid, tgid), tgid=tgid, tid=tid, detail=how)
            if stopped:  # the others wait for it
                return who
            at_rest.append(who)
        if at_rest:
            return at_rest[0]
        name = ctx.process_label(step.core) or "engine"
        return Culprit(kind="process", name=name, tgid=step.core, detail="busy, but no step ends")


RULE = _Frozen()
