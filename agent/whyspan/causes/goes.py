"""Goes of an event loop: what a loop thread does between two rests without touching any socket or pipe."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from whyspan.locks import Locks
from whyspan.threads import Timelines
from whyspan.timeline import BLOCKED, RUNNING

#: Shorter goes are an event loop's ordinary work. Source: CAUSES.md, python.loop_blocked.
LONG_GO_NS: Final = 50_000_000

#: What a loop thread does with a socket or pipe.
ACTIVITY: Final = ("sock_recv", "sock_send", "edge_read", "edge_write")


class Go(NamedTuple):
    """One go. ``busy_ns`` is time on a CPU or blocked; waits for a CPU or a lock are somebody else's doing."""

    start_ns: int
    end_ns: int
    busy_ns: int


def long_goes(timelines: Timelines, tid: int, rests: list[int], start_ns: int, end_ns: int) -> list[Go]:
    """Return the goes of at least 50 ms that overlap [start, end], ascending.

    Args:
        timelines: The window.
        tid: The loop thread.
        rests: When it left the CPU inside its polling call.
        start_ns: Start of the interval of interest; a go may begin before it.
        end_ns: Its end.
    """
    thread = timelines.thread(tid)
    rests = rests[max(bisect_right(rests, start_ns) - 1, 0) : bisect_right(rests, end_ns) + 1]
    resting = {t: thread.next_in(t) for t in rests}
    marks = set(rests) | {t for t in resting.values() if t is not None}
    rows = timelines.rows(tid)
    if rests:
        first = rests[0] if rests[0] <= start_ns else 0
        lo, hi = rows["ts_ns"].searchsorted(np.array([first, max(end_ns, rests[-1])], np.uint64))
        rows = rows[lo : hi + 1]
    kinds = [timelines.schema.kind(n) for n in ACTIVITY]
    marks.update(rows["ts_ns"][np.isin(rows["kind"], np.array(kinds))].tolist())
    if not len(rows):
        return []
    # The first and last events bound what is known of the thread.
    edges = sorted(marks | {int(rows["ts_ns"][0]), int(rows["ts_ns"][-1])})
    found: list[Go] = []
    locks = timelines.shared(Locks)
    for a, b in pairwise(edges):
        if b - a < LONG_GO_NS or a in resting or b <= start_ns or a >= end_ns:
            continue
        busy = sum(
            t - since
            for since, t, iv in thread.intervals(a, b)
            if iv.state == RUNNING or (iv.state == BLOCKED and not locks.waits(tid, thread, iv.at))
        )
        if busy >= LONG_GO_NS:
            found.append(Go(a, b, busy))
    return found
