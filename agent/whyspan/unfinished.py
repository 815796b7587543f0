"""What a request waits for that has not come to its end: nobody has woken the thread that will answer it."""

from __future__ import annotations

from collections.abc import Iterable

from whyspan.syscalls import FSYNC, WRITE
from whyspan.threads import Timelines
from whyspan.timeline import BLOCKED, UNKNOWN_STATE

_UNINTERRUPTIBLE = 2
#: Sleeping in one of these a thread is at work all the same: it writes, or stands in for a device by a nap.
_WORKING = WRITE | FSYNC | {35, 230}


def unfinished_work(timelines: Timelines, own: Iterable[int], t: int) -> tuple[int, int, int] | None:
    """Return (time, tid, tgid) of the thread that was at work for a request at *t*, or None.

    Args:
        timelines: The window.
        own: The threads that were set to work for the request; those that rest have handed it on or are done.
        t: When.
    """
    best: tuple[bool, int, int] | None = None
    for tid in sorted(own):
        thread = timelines.thread(tid)
        interval = thread.before(t)
        asleep = interval.state == BLOCKED
        if interval.state == UNKNOWN_STATE or (asleep and not _works(timelines, tid, interval.at)):
            continue
        # One that has not rested for longest is what holds the request up.
        rank = asleep, interval.start_ns if asleep else thread.awake_since(t), tid
        best = rank if best is None else min(best, rank)
    return None if best is None else (t, best[2], timelines.thread(best[2]).tgid)


def _works(timelines: Timelines, tid: int, at: int) -> bool:
    if at < 0:
        return False
    wait = timelines.thread(tid).wait(at)
    return bool(wait.prev_state & _UNINTERRUPTIBLE) or wait.syscall_nr in _WORKING
