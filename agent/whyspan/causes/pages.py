"""What a page fault that put a thread to sleep waited for."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from whyspan.causes.context import Context
from whyspan.causes.disk import uninterruptible
from whyspan.critical_path import PathSegment

FAULT, READ, AGAIN, SWAP = 1, 2, 4, 8  # aux of page_wait
#: The probe's record and the switch are made by two programs at one switch.
_SAME_SWITCH_NS: Final = 100_000


class PageWait(NamedTuple):
    """A ``page_wait`` record. ``pages`` were read by the thread before it slept."""

    flags: int
    inode: int
    dev: int
    pages: int
    swapped: int
    syscall_nr: int


def page_wait(segment: PathSegment, ctx: Context) -> PageWait | None:
    """Return what a page fault that put the thread to sleep waited for, or None."""
    wait = segment.wait
    if wait is None or not uninterruptible(segment):
        return None
    rows = ctx.memo(("page_wait", segment.tid), lambda: ctx.timelines.rows_of(segment.tid, "page_wait"))
    if not len(rows):
        return None
    ts = rows["ts_ns"]
    i = int(ts.searchsorted(np.uint64(max(wait.start_ns - _SAME_SWITCH_NS, 0))))
    near = [k for k in range(i, min(i + 4, len(rows))) if abs(int(ts[k]) - wait.start_ns) <= _SAME_SWITCH_NS]
    if not near:
        return None
    r = rows[min(near, key=lambda k: abs(int(ts[k]) - wait.start_ns))]
    fields = ("aux", "inode", "dev", "pages", "swapped", "syscall_nr")
    return PageWait(*(int(r[f]) for f in fields))
