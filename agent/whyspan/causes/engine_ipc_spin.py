"""``engine.ipc_spin``: a thread that only polled for its peer kept the CPU from one that had work to do."""

from __future__ import annotations

from whyspan.causes.context import MS, Context
from whyspan.causes.cpu_runqueue import waits_long
from whyspan.causes.rule import LONG_WAIT, Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import RUNNABLE, WAKEUP


class _IpcSpin:
    id = "engine.ipc_spin"
    title = "waiting for a CPU on which a thread of the engine span"
    neighbours = ("cpu.oversubscribed", "engine.cpu_bound_step")
    fix = "Try a shorter spin window or a blocking wait between the engine's processes, or one more core for it."
    rank = 28
    states = frozenset({RUNNABLE, WAKEUP})
    needs = frozenset({LONG_WAIT})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a long wait for a CPU that a spinning thread of the service used while its marks say it had no work."""
        if not waits_long(segment) or ctx.engine is None or not ctx.engine.core:
            return None
        seen = segment.rival
        if seen is None or seen.tgid not in ctx.service_tgids:  # the cheap look first
            return None
        rival = ctx.rival(segment)
        if rival is None or rival.tgid not in ctx.service_tgids or not ctx.facts.spins(rival.tid):
            return None
        handoffs = ctx.engine.handoffs
        middle = (segment.start_ns + segment.end_ns) // 2
        if not handoffs.knows(rival.tid) or handoffs.work_at(rival.tid, middle) is not None:
            return None
        name = ctx.thread_label(rival.tid, rival.tgid)
        who = Culprit(
            kind="thread",
            name=name,
            tgid=rival.tgid,
            tid=rival.tid,
            detail="polling with sched_yield, without work",
        )
        return Claim(self.id, f"CPU used by {name} ({rival.tid}), spinning", who)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how long the path waited for a CPU behind spinners."""
        waits = [s for s in path.segments if waits_long(s)]
        if not waits:
            return "no long wait for a CPU on the path: spinning threads took nothing from it"
        spun = sum(s.ns for s in waits if self.match(s, ctx)) / MS
        total = sum(s.ns for s in waits) / MS
        return f"long waits for a CPU {total:.1f} ms, of which behind spinning threads {spun:.1f} ms"


RULE = _IpcSpin()
