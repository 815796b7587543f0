"""``engine.kv_preemption``: the KV cache was full: the request lost its blocks and was computed again, or waited."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule, request_culprit
from whyspan.engines import EngineView, Job
from whyspan.engines.anonymous import NO_SLOT
from whyspan.engines.records import Preemption
from whyspan.engines.view import QUEUE
from whyspan.model import Culprit

_MAX_PREEMPTIONS: Final = 64  # the latest of a job


def _recomputed_ns(engine: EngineView, job: Job, p: Preemption) -> int:
    """When a preempted job was where it had been: the end of the first step that left nothing to do again."""
    for step in engine.table.steps_of(job, p.ts_ns, engine.request.end_ns):
        if step.begin_ns <= p.ts_ns or not step.done_ns:
            continue
        share = step.share(job.number)
        if share is None or (not share.left and share.computed + share.tokens >= p.lost):
            return step.done_ns
    return engine.request.end_ns


class _KvPreemption(DuringRule):
    id = "engine.kv_preemption"
    title = "because the KV cache was full"
    neighbours = ("engine.queueing", "engine.prefill_interference", "engine.kv_transfer")
    fix = (
        "Try more KV memory (gpu_memory_utilization, fewer weights per GPU), an fp8 KV cache, a lower max_num_seqs, "
        "or shorter contexts."
    )
    rank = 60
    nothing = "the request was not preempted, and did not wait for KV blocks"
    anonymous = True

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield from each preemption to the end of the recomputation, and the waits for blocks of a full pool."""
        for job in engine.jobs:
            r = engine.request
            for p in job.preemptions[-_MAX_PREEMPTIONS:]:
                if p.ts_ns >= r.end_ns:
                    continue
                back = _recomputed_ns(engine, job, p)
                yield During(
                    p.ts_ns,
                    back,
                    f"preempted; {p.lost} computed tokens lost",
                    self._culprit(engine, job, p.ts_ns),
                )
        yield from self._waited(engine)
        for step in engine.mine if engine.anonymous else ():
            if step.counts is not None and step.counts.result == NO_SLOT and step.done_ns:
                yield During(
                    step.begin_ns, step.done_ns, "llama.cpp found no place in its KV cache for the batch"
                )

    def _waited(self, engine: EngineView) -> Iterable[During]:
        queue, job = engine.phase(QUEUE), engine.job
        if queue is None or job is None:
            return
        for start, end, reason in engine.waits(job, queue.start_ns, queue.end_ns):
            usage = engine.kv_peak(start, end)
            if reason == "capacity":  # the scheduler found too few blocks, however many there were
                yield During(
                    start,
                    end,
                    f"waited for KV blocks; {usage:.0%} of the pool in use",
                    self._culprit(engine, job, start),
                )

    @staticmethod
    def _culprit(engine: EngineView, job: Job, t: int) -> Culprit | None:
        """Whoever held most of the blocks then: it filled the pool, whoever asked for the last one."""
        step = engine.step_at(t)
        if step is None:
            return None
        numbers = [*step.decodes, *(s.number for s in step.others)]
        jobs = [engine.table.job(job.core, n) for n in numbers if n not in engine.numbers]
        holders = [j for j in jobs if j is not None]
        who = max(holders, key=lambda j: (j.held, -j.number), default=None)
        if who is None:
            return None
        return request_culprit(
            who, f"{who.held} KV blocks for {who.prompt_tokens + who.output_tokens} tokens"
        )


RULE = _KvPreemption()
