"""``engine.zombie_request``: the request waited while slots were held for clients that had left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, DuringRule, request_culprit
from whyspan.engines import EngineView, Job
from whyspan.engines.view import QUEUE

#: An abort takes a moment to get through.
GRACE_NS: Final = 500_000_000


def zombies(engine: EngineView, start_ns: int, end_ns: int) -> list[tuple[int, int, Job]]:
    """Return (start, end, job) for the jobs that held a slot for a client that had left."""
    out = []
    for job in engine.table.jobs(engine.core):
        if not job.client_left_ns or not job.admitted_ns or job.number in engine.numbers:
            continue
        until = job.finished_ns or engine.request.end_ns
        if until - max(job.client_left_ns, job.admitted_ns) < GRACE_NS:
            continue
        lo = max(start_ns, job.client_left_ns, job.admitted_ns)
        hi = min(end_ns, until)
        if lo < hi:
            out.append((lo, hi, job))
    return out


class _Zombie(DuringRule):
    id = "engine.zombie_request"
    title = "in the queue while slots were held for clients that had left"
    neighbours = ("engine.queueing", "engine.kv_preemption")
    fix = (
        "Try fixing the abort path: the engine must be told when a client disconnects, also through proxies."
    )
    rank = 58
    nothing = "no slot was held for a client that had left"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the parts of the queue, waiting for a slot or for blocks, in which a zombie was at work."""
        queue, job = engine.phase(QUEUE), engine.job
        if queue is None or job is None:
            return
        for start, end, reason in engine.waits(job, queue.start_ns, queue.end_ns):
            if reason not in ("budget", "capacity", "step"):
                continue
            for lo, hi, zombie in zombies(engine, start, end):
                gone = (lo - zombie.client_left_ns) / MS
                who = request_culprit(zombie, f"its client left {gone:.0f} ms before")
                yield During(lo, hi, "a slot held for nobody", who)


RULE = _Zombie()
