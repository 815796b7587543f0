"""``memory.cgroup_limit``: the memory cgroup was full, and the thread had to free some of it before it got more."""

from __future__ import annotations

import mmap

from whyspan.causes.context import Context
from whyspan.causes.reclaiming import ReclaimRule, Stretch, most, size
from whyspan.critical_path import Path
from whyspan.model import Culprit, MemoryCgroupFact


class _CgroupLimit(ReclaimRule):
    id = "memory.cgroup_limit"
    title = "freeing memory of its cgroup, which was at its limit"
    neighbours = ("memory.reclaim", "memory.mmap_faults", "memory.allocator_growth", "io.disk_contention")
    fix = (
        "Try raising the memory limit of the cgroup, less memory for the process named, or fewer files read and "
        "written through the page cache, which counts too (fadvise DONTNEED, direct I/O)."
    )
    rank = 14
    events = ("memcg_reclaim",)
    what = "memory-cgroup reclaim"
    nothing = "no reclaim at a memory limit by a thread of the service"

    def culprit(self, stretch: Stretch, tgid: int, ctx: Context) -> Culprit:
        """Name the cgroup that was full, its limit, and who in it has most."""
        return ctx.memo(
            (self.id, stretch.cgroup_id, stretch.limit_pages), lambda: _culprit(stretch, tgid, ctx)
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the reclaim seen, and the limit with its counters."""
        limits = ctx.facts.memory.limits(ctx.request.tgid)
        seen = describe(limits[0]) if limits else "no memory limit known"
        return f"{super().rule_out(path, ctx)}; {seen}"


def _culprit(stretch: Stretch, tgid: int, ctx: Context) -> Culprit:
    fact = ctx.facts.memory.cgroup(stretch.cgroup_id)
    if fact is not None:
        return Culprit(kind="cgroup", name=fact.path, tgid=tgid, detail=describe(fact, stretch.high))
    # Not looked at, or of a limit that was there for a moment.
    own = ctx.facts.memory.process(tgid)
    name = own.cgroup if own is not None and own.cgroup else "memory cgroup not known"
    limit = f"limit {size(stretch.limit_pages * mmap.PAGESIZE)}" if stretch.limit_pages else ""
    return Culprit(kind="cgroup", name=name, tgid=tgid, detail=limit)


def describe(fact: MemoryCgroupFact, high: bool = False) -> str:
    """Return a limited memory cgroup in words: its limit, what fills it, and who in it has most."""
    by_high = (high and fact.high_bytes) or not fact.limit_bytes
    limit = f"memory.high {size(fact.high_bytes)}" if by_high else f"limit {size(fact.limit_bytes)}"
    used = f"{size(fact.usage_bytes)} used: {size(fact.anon_bytes)} anonymous, {size(fact.file_bytes)} page cache"
    swap = f", {size(fact.swap_bytes)} swapped out" if fact.swap_bytes else ""
    hits = f"{fact.high_hits if by_high else fact.hits} times at it"
    return "; ".join(filter(None, (f"{limit}, {hits}", used + swap, most(fact.users))))


RULE = _CgroupLimit()
