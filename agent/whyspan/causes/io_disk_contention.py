"""``io.disk_contention``: the thread waited for a disk that was slow or busy with others."""

from __future__ import annotations

from typing import Final

from whyspan import syscalls
from whyspan.causes.context import MS, BlockIo, Context
from whyspan.causes.rule import Claim
from whyspan.causes.work import block_interrupt
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, TASK

#: A wait for a disk worth a cause.
LONG_IO_NS: Final = 10_000_000

_UNINTERRUPTIBLE: Final = 2
_FD_FILE_KINDS: Final = (0, 1, 2)  # not known, file, directory


class _DiskContention:
    id = "io.disk_contention"
    title = "waiting for the disk"
    neighbours = ("io.log_blocked", "memory.mmap_faults")
    fix = "Try an I/O limit (io.max) on the busy writer, a separate disk, or smaller dirty limits."
    rank = 40
    states = frozenset({BLOCKED})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim an uninterruptible wait of 10 ms or more during which block requests completed."""
        if not _waits_for_disk(segment) or segment.whole_ns < LONG_IO_NS or segment.wait is None:
            return None
        io = ctx.block_io(segment.wait)
        if io is None:
            return None
        call = syscalls.name(segment.wait.syscall_nr) or "the kernel"
        return Claim(self.id, f"{call} on {_device(io)}", _culprit(io, ctx))

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the disk waits on the path."""
        waits = [s for s in path.segments if _waits_for_disk(s)]
        if not waits:
            return "uninterruptible file-system or block waits on the path 0.0 ms"
        longest = max(waits, key=lambda s: s.whole_ns)
        io = ctx.block_io(longest.wait) if longest.wait is not None else None
        seen = (
            f"{io.requests} block requests, slowest {io.max_latency_ns / MS:.1f} ms"
            if io
            else "no block request"
        )
        total = sum(s.ns for s in waits) / MS
        return f"disk waits {total:.1f} ms, longest {longest.whole_ns / MS:.1f} ms; {seen}"


def _waits_for_disk(segment: PathSegment) -> bool:
    wait = segment.wait
    if segment.state != BLOCKED or wait is None or not wait.prev_state & _UNINTERRUPTIBLE:
        return False
    if wait.fd is not None and wait.fd.kind not in _FD_FILE_KINDS:
        return False
    # A task may end it too: a kernel worker or the journal's thread completes what the device did.
    return block_interrupt(wait) or wait.context == TASK or segment.inferred


def _device(io: BlockIo) -> str:
    return f"device {io.dev >> 20}:{io.dev & 0xFFFFF}"


def _culprit(io: BlockIo, ctx: Context) -> Culprit:
    median, slowest = io.median_latency_ns / MS, io.max_latency_ns / MS
    latency = f"{io.requests} requests, median {median:.1f} ms, slowest {slowest:.1f} ms"
    # Several writers may share the blame: the one with most of it stands for them.
    if io.other_tid and io.others_bytes > io.own_bytes:
        name = ctx.process_label(io.other_tgid, io.other_tid)
        moved = f"{io.other_bytes / 1e6:.1f} of {io.total_bytes / 1e6:.1f} MB on {_device(io)}"
        detail = "; ".join(filter(None, (ctx.where(io.other_tgid), moved, latency)))
        return Culprit(kind="process", name=name, tgid=io.other_tgid, tid=io.other_tid, detail=detail)
    return Culprit(kind="file", name=_device(io), detail=latency)


RULE = _DiskContention()
