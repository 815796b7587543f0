"""``memory.swap``: the thread touched memory of its own that had been swapped out."""

from __future__ import annotations

import mmap

import numpy as np

from whyspan.causes.context import MS, Context
from whyspan.causes.pages import SWAP, page_wait
from whyspan.causes.reclaiming import most, size
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED

_RECLAIMS = ("direct_reclaim", "memcg_reclaim", "compaction")
_KERNEL_READS = 1  # aux of block_done: a write


class _Swap:
    id = "memory.swap"
    title = "reading its own memory back from swap"
    neighbours = ("memory.reclaim", "memory.mmap_faults", "io.disk_contention")
    fix = (
        "Try no swap for the engine (memory.swap.max=0, or mlock), more memory or a higher limit for its cgroup, or "
        "less memory for whoever fills it."
    )
    rank = 15
    states = frozenset({BLOCKED})

    def applies(self, ctx: Context) -> bool:
        """Return whether a fault that may be for swap waited beside the request."""
        return bool((ctx.timelines.select("page_wait")["aux"] & SWAP).any())

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a fault on no file, asleep for I/O, of a process with memory in swap, that does not reclaim."""
        fault = page_wait(segment, ctx)
        if fault is None or not fault.flags & SWAP or _reclaims(segment, ctx):
            return None
        return Claim(
            self.id,
            f"page fault on memory in {ctx.facts.storage.swap_names()}",
            _culprit(segment.tgid, ctx),
            inferred=not _read(segment, ctx),
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the faults on the path that may have been for swap."""
        found = [s for s in path.segments if (f := page_wait(s, ctx)) is not None and f.flags & SWAP]
        if not found:
            return "no page fault on the path that waited for swap (swap that is read without sleeping is not seen)"
        return f"{len(found)} page faults that may be for swap waited {sum(s.ns for s in found) / MS:.1f} ms"


def _reclaims(segment: PathSegment, ctx: Context) -> bool:
    """Whether the thread was freeing memory when it went to sleep."""
    at = np.uint64(max(segment.wait.start_ns, 0)) if segment.wait is not None else np.uint64(segment.start_ns)
    for name in _RECLAIMS:
        rows = ctx.timelines.rows_of(segment.tid, name)
        if len(rows) and ((rows["begin_ns"] <= at) & (rows["ts_ns"] >= at)).any():
            return True
    return False


def _read(segment: PathSegment, ctx: Context) -> bool:
    """Whether a swap device was read meanwhile; of a file in a file system only that a disk was."""
    wait = segment.wait
    if wait is None:
        return False
    rows = ctx.timelines.select("block_done")
    devs = ctx.facts.storage.swap.devs
    if not len(rows):
        return False
    start, end = np.uint64(max(wait.start_ns, 0)), np.uint64(max(wait.end_ns, 0))
    reads = (rows["ts_ns"] >= start) & (rows["issue_ns"] <= end) & ((rows["aux"] & _KERNEL_READS) == 0)
    return bool((reads & np.isin(rows["dev"], devs)).any() if devs else reads.any())


def _culprit(tgid: int, ctx: Context) -> Culprit:
    return ctx.memo(("swap", tgid), lambda: _process(tgid, ctx))


def _process(tgid: int, ctx: Context) -> Culprit:
    rows = ctx.timelines.select("page_wait")
    lo, hi = np.uint64(ctx.request.start_ns), np.uint64(ctx.request.end_ns)
    mine = rows[(rows["tgid"] == tgid) & ((rows["aux"] & SWAP) != 0)]
    inside = mine[(mine["ts_ns"] >= lo) & (mine["ts_ns"] <= hi)]
    swapped = int(mine["swapped"].max()) * mmap.PAGESIZE if len(mine) else 0
    memory = ctx.facts.memory
    fact, host, limits = memory.process(tgid), memory.host, memory.limits(tgid)
    group = f"its memory cgroup is {fact.cgroup}" if fact is not None and fact.cgroup not in ("", "/") else ""
    users = limits[0].users if limits else host.users if host is not None else []
    told = (
        f"{len(inside)} faults on its memory in {ctx.facts.storage.swap_names()}, where {size(swapped)} of it is",
        group,
        most(users),
    )
    return Culprit(
        kind="process", name=ctx.process_label(tgid), tgid=tgid, detail="; ".join(filter(None, told))
    )


RULE = _Swap()
