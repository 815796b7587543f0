"""``memory.mmap_faults``: the thread touched a page of a mapped file that was not in memory."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from whyspan import syscalls
from whyspan.causes import disk, engine_reload
from whyspan.causes.context import MS, Context
from whyspan.causes.pages import FAULT, READ, SWAP, PageWait, page_wait
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED

#: The disk's other users are to blame instead if they ask this many times as much of it.
_CLEARLY: Final = 4.0


class _MmapFaults:
    id = "memory.mmap_faults"
    title = "reading a mapped file from storage, page by page (major faults)"
    neighbours = ("memory.reclaim", "io.disk_contention")
    fix = (
        "Try reading the file ahead at the start (prefetch, --load-format without mmap), locking it (mlock), a local "
        "disk, or more memory so that it stays cached."
    )
    rank = 17
    states = frozenset({BLOCKED})

    def applies(self, ctx: Context) -> bool:
        """Return whether any page fault waited for storage beside the request."""
        return bool(len(ctx.timelines.select("page_wait")))

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a fault on a mapped file that slept, unless an engine loads a model or the disk is others'."""
        fault = page_wait(segment, ctx)
        if fault is None or not on_file(fault) or _reloads(segment, ctx) or _crowded(segment, fault, ctx):
            return None
        call = "" if fault.syscall_nr < 0 else f" in {syscalls.name(fault.syscall_nr)}"
        path = _path(segment.tgid, fault.inode, fault.dev, ctx)
        return Claim(
            self.id, f"page fault{call} on {path}", _culprit(segment.tgid, fault.inode, fault.dev, ctx)
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the faults on the path and their time."""
        found = [(s, f) for s in path.segments if (f := page_wait(s, ctx)) is not None and on_file(f)]
        if not found:
            return "no page fault on a mapped file that waited for storage on the path"
        total = sum(s.ns for s, _ in found) / MS
        return f"{len(found)} page faults on mapped files waited {total:.1f} ms for storage"


def on_file(fault: PageWait) -> bool:
    """Return whether a fault was on a mapped file."""
    return bool(fault.flags & FAULT) or (fault.syscall_nr == syscalls.PAGE_FAULT and not fault.flags & SWAP)


def _reloads(segment: PathSegment, ctx: Context) -> bool:
    """Whether the thread loads a model's weights just then: that is ``engine.reload``."""
    rule = engine_reload.RULE
    during = rule.during(ctx)
    return (
        bool(during)
        and during.first(segment.start_ns, segment.end_ns) is not None
        and rule.takes(segment, ctx)
    )


def _crowded(segment: PathSegment, fault: PageWait, ctx: Context) -> bool:
    if segment.wait is None or segment.whole_ns < disk.LONG_IO_NS:
        return False  # io.disk_contention would not have it
    io = disk.traffic(segment.wait, ctx, fault.dev)
    return io is not None and io.dev == fault.dev and io.busy_with_others(_CLEARLY)


def _path(tgid: int, inode: int, dev: int, ctx: Context) -> str:
    found = ctx.facts.storage.mapped(tgid, inode, dev)
    return found or f"inode {inode} on {ctx.facts.storage.device(dev)}"


def _culprit(tgid: int, inode: int, dev: int, ctx: Context) -> Culprit:
    return ctx.memo(("mmap", tgid, inode, dev), lambda: _file(tgid, inode, dev, ctx))


def _file(tgid: int, inode: int, dev: int, ctx: Context) -> Culprit:
    rows = ctx.timelines.select("page_wait")
    lo, hi = np.uint64(ctx.request.start_ns), np.uint64(ctx.request.end_ns)
    mine = rows[
        (rows["inode"] == inode) & (rows["dev"] == dev) & (rows["ts_ns"] >= lo) & (rows["ts_ns"] <= hi)
    ]
    faults = mine[(mine["aux"] & (FAULT | READ)) != 0]
    read = int(mine["pages"].sum()) * mmap.PAGESIZE
    detail = f"{len(faults)} faults slept, {read / 1e6:.1f} MB read from {ctx.facts.storage.device(dev)}"
    return Culprit(kind="file", name=_path(tgid, inode, dev, ctx), tgid=tgid, detail=detail)


RULE = _MmapFaults()
