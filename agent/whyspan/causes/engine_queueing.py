"""``engine.queueing``: the request waited for its turn while the engine had memory for it."""

from __future__ import annotations

from collections.abc import Iterable

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, DuringRule, turn_culprit
from whyspan.engines import EngineView
from whyspan.engines.view import HANDOVER, QUEUE
from whyspan.model import Culprit

_WORDS = {
    "step": "behind the step in progress",
    "budget": "no slot or token budget left",
    "capacity": "no KV blocks left",
    "grammar": "until its grammar was compiled",
    "throttled": "prefills were held back",
}


class _Queueing(DuringRule):
    id = "engine.queueing"
    title = "in the engine's queue"
    neighbours = ("python.pool_exhausted", "engine.kv_preemption", "engine.prefill_interference")
    fix = "Try a larger max_num_seqs or token budget, another replica, or shedding load earlier."
    rank = 70
    nothing = "the request was scheduled as soon as it was queued"
    anonymous = True

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the queue with the scheduler's reasons, and the hand-over as far as the core was in a step."""
        job = engine.job
        if engine.anonymous:
            yield from self._behind(engine)
        if job is None:
            return
        queue, handover = engine.phase(QUEUE), engine.phase(HANDOVER)
        if handover is not None:
            for step in engine.steps:
                lo, hi = (
                    max(step.begin_ns, handover.start_ns),
                    min(step.done_ns or handover.end_ns, handover.end_ns),
                )
                if lo < hi:
                    yield During(lo, hi, _WORDS["step"], self._culprit(engine))
        if queue is not None:
            for start, end, reason in engine.waits(job, queue.start_ns, queue.end_ns):
                yield During(start, end, _WORDS.get(reason, reason), self._culprit(engine))

    @staticmethod
    def _behind(engine: EngineView) -> Iterable[During]:
        """Yield, where steps name no requests, the calls it waited behind; of a feed, while others were queued."""
        if engine.fed:
            until, most = engine.queued_until()
            if most:
                who = turn_culprit(None, engine, f"up to {most} requests waiting")
                yield During(engine.request.start_ns, until, "requests were waiting", who, inferred=True)
            return
        for w in engine.behind:
            took = f"{len(w.call.steps)} steps" + (f" in {w.call.ns / MS:.0f} ms" if w.call.ns else "")
            who = turn_culprit(w.call.owner, engine, took)
            yield During(w.start_ns, w.end_ns, "behind the steps of another request", who, w.inferred)

    @staticmethod
    def _culprit(engine: EngineView) -> Culprit:
        queue = engine.phase(QUEUE)
        at = queue.end_ns if queue is not None else engine.request.end_ns
        step = next((s for s in reversed(engine.steps) if s.begin_ns < at), None)
        load = f"{step.running} running, {step.waiting} waiting" if step is not None else ""
        instance = engine.instance
        limit = instance.hello.config.get("max_num_seqs", "") if instance and instance.hello else ""
        if limit:
            load += f", max_num_seqs {limit}"
        return Culprit(
            kind="process", name=engine.facts.comm(engine.core) or "engine", tgid=engine.core, detail=load
        )


RULE = _Queueing()
