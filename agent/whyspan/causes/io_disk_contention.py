"""``io.disk_contention``: the thread waited for a disk that was slow or busy with others."""

from __future__ import annotations

from typing import Final

from whyspan import syscalls
from whyspan.causes import disk
from whyspan.causes.context import MS, Context
from whyspan.causes.disk import LONG_IO_NS, Traffic
from whyspan.causes.rule import Claim
from whyspan.causes.work import block_interrupt
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import TASK

_FD_FILE_KINDS: Final = (0, 1, 2)  # not known, file, directory


class _DiskContention:
    id = "io.disk_contention"
    title = "waiting for the disk"
    neighbours = ("io.log_blocked", "memory.mmap_faults")
    fix = "Try an I/O limit (io.max) on the busy writer, a separate disk, or smaller dirty limits."
    rank = 40
    states = frozenset({"blocked"})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim an uninterruptible wait of 10 ms or more during which block requests completed."""
        if not waits_for_disk(segment) or segment.whole_ns < LONG_IO_NS or segment.wait is None:
            return None
        io = disk.traffic(segment.wait, ctx)
        if io is None:
            return None
        return Claim(self.id, f"{doing(segment, ctx)}, {ctx.facts.storage.device(io.dev)}", _culprit(io, ctx))

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the disk waits on the path."""
        waits = [s for s in path.segments if waits_for_disk(s)]
        if not waits:
            return "uninterruptible file-system or block waits on the path 0.0 ms"
        longest = max(waits, key=lambda s: s.whole_ns)
        io = disk.traffic(longest.wait, ctx) if longest.wait is not None else None
        seen = (
            f"{io.requests} block requests, slowest {io.max_latency_ns / MS:.1f} ms"
            f", of others {io.others.size / 1e6:.1f} MB of {io.size / 1e6:.1f}"
            if io
            else "no block request"
        )
        total = sum(s.ns for s in waits) / MS
        return f"disk waits {total:.1f} ms, longest {longest.whole_ns / MS:.1f} ms; {seen}"


def waits_for_disk(segment: PathSegment) -> bool:
    """Return whether a segment may be a wait for a disk: uninterruptible, on a file, ended by it."""
    wait = segment.wait
    if wait is None or not disk.uninterruptible(segment):
        return False
    if wait.fd is not None and wait.fd.kind not in _FD_FILE_KINDS:
        return False
    # A task may end it too: a kernel worker or the journal's thread completes what the device did.
    return block_interrupt(wait) or wait.context == TASK or segment.inferred


def doing(segment: PathSegment, ctx: Context) -> str:
    """Return in which call, and on which file, a thread waits."""
    nr = segment.wait.syscall_nr if segment.wait is not None else syscalls.NOT_APPLICABLE
    call = syscalls.name(nr) or "the kernel"
    _, fact = ctx.descriptor(segment)
    return f"{call} on {fact.path}" if fact is not None and fact.path else call


def _culprit(io: Traffic, ctx: Context) -> Culprit:
    # Several writers may share the blame: the one with most of it stands for them.
    if io.other_tid and io.others.size > io.own.size:
        return disk.busiest(io, ctx)
    return Culprit(kind="file", name=ctx.facts.storage.device(io.dev), detail=io.latency())


RULE = _DiskContention()
