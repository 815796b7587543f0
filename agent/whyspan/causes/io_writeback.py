"""``io.writeback``: the thread's fsync or write waited until somebody else's dirty data was on the disk."""

from __future__ import annotations

from typing import Final

from whyspan import syscalls
from whyspan.causes import dirty, disk
from whyspan.causes.context import MS, Context
from whyspan.causes.disk import LONG_IO_NS
from whyspan.causes.io_disk_contention import doing, waits_for_disk
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED

_EVENTS: Final = ("file_flush", "dirty_pause", "block_done")


class _Writeback:
    id = "io.writeback"
    title = "waiting until others' dirty data was written back"
    neighbours = ("io.disk_contention", "io.log_blocked", "memory.reclaim")
    fix = (
        "Try smaller dirty limits (vm.dirty_background_bytes, vm.dirty_bytes), having the writer flush as it goes "
        "(sync_file_range, O_DIRECT) or limiting it (io.max), or a file system of its own for the server's files."
    )
    rank = 39
    states = frozenset({BLOCKED})

    def applies(self, ctx: Context) -> bool:
        """Return whether anything was written beside the request."""
        return any(len(ctx.timelines.select(name)) for name in _EVENTS)

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a pause that the kernel imposes, or a wait in which the disk was busy with write-back of others."""
        wait = segment.wait
        if wait is None or not disk.uninterruptible(segment) or segment.whole_ns < LONG_IO_NS:
            return None
        paused = dirty.pauses(segment, ctx)
        if paused:
            what = (
                f"{doing(segment, ctx)}, paused while too much is dirty on {ctx.facts.storage.device(paused)}"
            )
            return Claim(self.id, what, dirty.dirtier(wait, ctx, paused) or _unnamed(paused, ctx))
        return self._flushing(segment, ctx) if waits_for_disk(segment) else None

    def _flushing(self, segment: PathSegment, ctx: Context) -> Claim | None:
        wait = segment.wait
        if wait is None or not (wait.syscall_nr in syscalls.FSYNC or wait.syscall_nr in syscalls.WRITE):
            return None
        io = disk.traffic(wait, ctx)
        if io is None or not io.busy_with_flush():
            return None
        seen = dirty.flushes(wait, ctx, io.dev)
        if not seen and len(ctx.timelines.select("file_flush")):
            return None  # what is written back is the thread's own
        flushed = f"{io.flushed.size / 1e6:.1f} of {io.size / 1e6:.1f} MB written back meanwhile"
        what = f"{doing(segment, ctx)}, {flushed} on {ctx.facts.storage.device(io.dev)}"
        return Claim(self.id, what, dirty.dirtier(wait, ctx, io.dev) or _unnamed(io.dev, ctx))

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the longest write or fsync, and what was written back beside it."""
        waits = [
            s
            for s in path.segments
            if s.wait is not None
            and disk.uninterruptible(s)
            and (s.wait.syscall_nr in syscalls.FSYNC or s.wait.syscall_nr in syscalls.WRITE)
        ]
        if not waits:
            return "waits for a disk in write or fsync on the path 0.0 ms"
        longest = max(waits, key=lambda s: s.whole_ns)
        io = disk.traffic(longest.wait, ctx) if longest.wait is not None else None
        seen = f"{io.flushed.size / 1e6:.1f} of {io.size / 1e6:.1f} MB" if io is not None else "nothing"
        return (
            f"the longest such wait {longest.whole_ns / MS:.1f} ms; written back for others meanwhile: {seen}"
        )


def _unnamed(dev: int, ctx: Context) -> Culprit:
    return Culprit(kind="file", name=ctx.facts.storage.device(dev), detail="whose data it was is not known")


RULE = _Writeback()
