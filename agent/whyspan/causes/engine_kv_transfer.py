"""``engine.kv_transfer``: the request waited for KV blocks from another tier or host."""

from __future__ import annotations

from collections.abc import Iterable

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule
from whyspan.engines import EngineView
from whyspan.engines.view import QUEUE
from whyspan.model import Culprit

REASON = "remote_kv"


class _KvTransfer(DuringRule):
    id = "engine.kv_transfer"
    title = "waiting for KV blocks from another tier or host"
    neighbours = ("engine.kv_preemption", "engine.queueing")
    fix = "Try a time-out with recomputation as the fall-back, larger transfer buffers, or a look at the sender's load."
    rank = 59
    nothing = "the scheduler did not say that the request waited for remote KV blocks"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the parts of the queue in which the scheduler passed it over for want of remote blocks."""
        queue, job = engine.phase(QUEUE), engine.job
        if queue is None or job is None:
            return
        for start, end, reason in engine.waits(job, queue.start_ns, queue.end_ns):
            if reason == REASON:
                who = Culprit(
                    kind="process",
                    name=ctx.process_label(job.core) or "engine",
                    tgid=job.core,
                    detail="KV blocks that had not come from the other tier",
                )
                yield During(start, end, "the scheduler's reason: remote KV blocks", who)


RULE = _KvTransfer()
