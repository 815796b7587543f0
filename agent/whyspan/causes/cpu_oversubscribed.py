"""``cpu.oversubscribed``: the service's own threads want more CPUs than it may use."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.cpu_runqueue import waits_long
from whyspan.causes.retries import storm
from whyspan.causes.rule import LONG_WAIT, Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import RUNNABLE, WAKEUP

#: Threads that want a CPU, per CPU allowed. Source: CAUSES.md, cpu.oversubscribed.
MIN_RATIO: Final = 1.5


class _CpuOversubscribed:
    id = "cpu.oversubscribed"
    title = "waiting for a CPU that the service's own threads used"
    neighbours = ("cpu.throttled", "cpu.runqueue")
    fix = (
        "Try OMP_NUM_THREADS / torch.set_num_threads / -t equal to the CPUs the service may use, "
        "and a passive wait policy (OMP_WAIT_POLICY=passive)."
    )
    rank = 31
    states = frozenset({RUNNABLE, WAKEUP})
    needs = frozenset({LONG_WAIT})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a long wait behind siblings while at least 1.5 threads per allowed CPU want to run.

        With fewer, two threads only took turns on a CPU: that is ordinary scheduling.
        """
        if not waits_long(segment):
            return None
        rival = ctx.rival(segment)
        if rival is None or rival.tgid not in ctx.service_tgids:
            return None
        if storm(ctx) is not None:
            return None  # the threads have too much to do because clients send it again: client.retry_storm
        cpus = ctx.cpus()
        if cpus == 0 or ctx.demand(segment) < MIN_RATIO * cpus:
            return None
        name = ctx.request.service or ctx.process_label(ctx.request.tgid)
        return Claim(
            self.id,
            f"CPU used by sibling threads of {name}",
            Culprit(kind="process", name=name, tgid=rival.tgid, detail=f"{cpus} CPUs allowed"),
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the waits behind siblings and how many threads wanted the CPUs then."""
        cpus = ctx.cpus()
        allowed = f"{cpus} CPUs allowed" if cpus else "allowed CPUs not known"
        behind = []
        for s in path.segments:
            rival = ctx.rival(s) if waits_long(s) else None
            if rival is not None and rival.tgid in ctx.service_tgids:
                behind.append(s)
        if not behind:
            return f"waits behind the service's own threads 0.0 ms; {allowed}"
        most = max(ctx.demand(s) for s in behind)
        total = sum(s.ns for s in behind) / MS
        return f"waits behind own threads {total:.1f} ms, at most {most:.1f} of them ready; {allowed}"


RULE = _CpuOversubscribed()
