"""``cpu.runqueue``: another process had the CPU while the thread was ready to run."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import RUNNABLE, WAKEUP

#: Shorter waits are ordinary scheduling: about one slice of the default scheduler (base_slice_ns, 0.7-3 ms).
LONG_WAIT_NS: Final = 1_000_000


def waits_long(segment: PathSegment) -> bool:
    """Return whether the segment is part of a wait for a CPU worth a cause."""
    return segment.state in (RUNNABLE, WAKEUP) and segment.whole_ns >= LONG_WAIT_NS


class _CpuRunqueue:
    id = "cpu.runqueue"
    title = "waiting for a CPU that another process used"
    neighbours = ("cpu.throttled", "cpu.oversubscribed", "io.log_blocked")
    fix = (
        "Try moving the other process away: another host, a cpuset, or a lower CPU weight than the server's; "
        "or isolate cores for the server."
    )
    rank = 30
    states = frozenset({RUNNABLE, WAKEUP})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a long wait for a CPU that a process outside the service used."""
        if not waits_long(segment):
            return None
        rival = ctx.rival(segment)
        if rival is None or rival.tgid in ctx.service_tgids:
            return None
        name = ctx.process_label(rival.tgid, rival.tid)
        return Claim(
            self.id,
            f"CPU used by {name} ({rival.tgid})",
            Culprit(kind="process", name=name, tgid=rival.tgid, detail=ctx.where(rival.tgid)),
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the long waits for a CPU and how many of them were other processes' doing."""
        waits = [s for s in path.segments if waits_long(s)]
        if not waits:
            total = path.ns(RUNNABLE, WAKEUP) / MS
            return f"no wait for a CPU of 1 ms or more on the path (all waits together {total:.1f} ms)"
        others = sum(s.ns for s in waits if self.match(s, ctx)) / MS
        total = sum(s.ns for s in waits) / MS
        return f"long waits for a CPU {total:.1f} ms, of which behind other processes {others:.1f} ms"


RULE = _CpuRunqueue()
