"""``io.log_blocked``: a log line, a full output pipe or a log's fsync held the thread up."""

from __future__ import annotations

from typing import Final

from whyspan import syscalls
from whyspan.causes import dirty, disk
from whyspan.causes.context import MS, Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit, FdFact
from whyspan.timeline import BLOCKED, TASK

#: Source: CAUSES.md, io.log_blocked.
LONG_WRITE_NS: Final = 10_000_000

_FD_FILE: Final = 1
_FD_PIPE: Final = 3
_FD_CHAR: Final = 7
_STANDARD_OUTPUTS: Final = (1, 2)


class _LogBlocked:
    id = "io.log_blocked"
    title = "blocked writing log output"
    neighbours = ("io.disk_contention", "python.loop_blocked")
    fix = (
        "Try logging less, an asynchronous or non-blocking log handler, a reader of the pipe that keeps up, "
        "and no fsync on log files."
    )
    rank = 20
    states = frozenset({BLOCKED})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a write or fsync of more than 10 ms to standard output, a pipe, or a log file."""
        if not _writes(segment) or segment.wait is None:
            return None
        if max(segment.whole_ns, ctx.write_call_ns(segment)) <= LONG_WRITE_NS:
            return None
        fd, fact = ctx.descriptor(segment)
        target = _target(segment, fd, fact)
        if not target:
            return None
        if _disk_is_others(segment, ctx):
            return None
        call = syscalls.name(segment.wait.syscall_nr)
        where = _disk(segment, ctx)
        return Claim(self.id, f"{call} to {target}{where}", _culprit(segment, fd, fact, target, ctx))

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the longest write on the path, and to what."""
        writes = [s for s in path.segments if _writes(s)]
        if not writes:
            return "blocked writing on the path 0.0 ms"
        longest = max(writes, key=lambda s: max(s.whole_ns, ctx.write_call_ns(s)))
        fd, fact = ctx.descriptor(longest)
        total = sum(s.ns for s in writes) / MS
        ms = max(longest.whole_ns, ctx.write_call_ns(longest)) / MS
        target = _target(longest, fd, fact) or (fact.path if fact is not None else "") or f"descriptor {fd}"
        return f"blocked writing {total:.1f} ms, the longest {ms:.1f} ms to {target}"


def _disk_is_others(segment: PathSegment, ctx: Context) -> bool:
    """Whether the log is on a disk that others, or the write-back of their data, keep clearly busier than it does."""
    wait = segment.wait
    if wait is None or not disk.uninterruptible(segment) or wait.fd is None or wait.fd.kind != _FD_FILE:
        return False
    io = disk.traffic(wait, ctx)
    if io is None:
        return False
    return io.busy_with_others() or (io.busy_with_flush() and bool(dirty.flushes(wait, ctx, io.dev)))


def _writes(segment: PathSegment) -> bool:
    nr = segment.wait.syscall_nr if segment.wait is not None else syscalls.NOT_APPLICABLE
    return segment.state == BLOCKED and (nr in syscalls.WRITE or nr in syscalls.FSYNC)


def _target(segment: PathSegment, fd: int, fact: FdFact | None) -> str:
    """Return what log output the descriptor is, in words; empty when it is none."""
    wait = segment.wait
    kind = wait.fd.kind if wait is not None and wait.fd is not None else 0
    if fact is not None and _is_log(fact.path):
        return fact.path
    if kind == _FD_PIPE or (fact is not None and fact.kind == "pipe"):
        return {1: "the standard output pipe", 2: "the standard error pipe"}.get(
            fd, f"a pipe (descriptor {fd})"
        )
    if fd in _STANDARD_OUTPUTS and kind in (0, _FD_FILE, _FD_PIPE, _FD_CHAR):
        return "standard output" if fd == 1 else "standard error"
    return ""


def _disk(segment: PathSegment, ctx: Context) -> str:
    """The disk that a file's write waited for, and how busy others kept it; empty where none is seen."""
    if segment.wait is None or not disk.uninterruptible(segment):
        return ""
    io = disk.traffic(segment.wait, ctx)
    if io is None:
        return ""
    moved = f"{io.size / 1e6:.1f} MB moved meanwhile, {io.others.size / 1e6:.1f} MB of it by others"
    return f" on {ctx.facts.storage.device(io.dev)}, {moved}"


def _is_log(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.endswith(".log") or ".log." in name or path.startswith("/var/log/")


def _culprit(segment: PathSegment, fd: int, fact: FdFact | None, target: str, ctx: Context) -> Culprit:
    detail = f"reads descriptor {fd} of {ctx.process_label(segment.tgid)}"
    if fact is not None and fact.peer_tgid:
        name = fact.peer_comm or ctx.process_label(fact.peer_tgid)
        return Culprit(kind="process", name=name, tgid=fact.peer_tgid, detail=detail)
    wait = segment.wait
    pipe = (wait is not None and wait.fd is not None and wait.fd.kind == _FD_PIPE) or (
        fact is not None and fact.kind == "pipe"
    )
    if pipe and wait is not None and wait.context == TASK and wait.waker_tgid:
        name = ctx.process_label(wait.waker_tgid, wait.waker_tid)
        return Culprit(kind="process", name=name, tgid=wait.waker_tgid, detail=detail)
    path = fact.path if fact is not None else ""
    return Culprit(kind="file", name=path or target, tgid=segment.tgid, detail=f"descriptor {fd}")


RULE = _LogBlocked()
