"""``memory.compaction``: the thread had to move pages about to get a large block, as huge pages are."""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.reclaiming import ReclaimRule, Stretch
from whyspan.model import Culprit


class _Compaction(ReclaimRule):
    id = "memory.compaction"
    title = "moving pages about to get a huge page (direct compaction)"
    neighbours = ("memory.reclaim", "memory.cgroup_limit", "memory.mmap_faults")
    fix = (
        "Try /sys/kernel/mm/transparent_hugepage/defrag = defer (or defer+madvise), no MADV_HUGEPAGE in the process, "
        "or huge pages reserved beforehand."
    )
    rank = 13
    events = ("compaction",)
    what = "direct compaction"
    frees_nothing = True
    nothing = "no direct compaction by a thread of the service"

    def culprit(self, stretch: Stretch, tgid: int, ctx: Context) -> Culprit:
        """Name the process that asked for such a block."""
        return Culprit(
            kind="process",
            name=ctx.process_label(tgid),
            tgid=tgid,
            detail="it asks for huge pages or large blocks",
        )


RULE = _Compaction()
