"""Waits for a free thread of a pool: of those that work for an event loop, or of those that serve connections.

A pool that is full shows by what does *not* happen: nobody is woken for the request, no connection is opened for it,
no thread runs for it. Sooner or later a slot that was busy with somebody else's work is used for it at once, without
having rested in between: from when the request was handed to the pool until then it waited for the slot.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from whyspan_probes.schema import Events

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.edges import UNIX
from whyspan.model import Culprit
from whyspan.syscalls import EPOLL, POLL
from whyspan.timeline import BLOCKED, TASK

#: A shorter wait for a slot is ordinary.
MIN_NS: Final = 1_000_000
#: Between the end of a connection's last response and its next request, for it to count as used again at once.
AGAIN_NS: Final = 5_000_000
#: A thread that slept longer than this in a futex had nothing to do; the interpreter lock is asked for every 5 ms.
IDLE_NS: Final = 6_000_000
#: How far back of a hand-over a pool's threads and connections are looked for.
_BACK_NS: Final = 1_000_000_000
_FUTEX: Final = 202
#: Families of sockets, as ``aux`` of the socket events has them.
INET: Final = (2, 10)
_MAX_MEMBERS: Final = 512
_HOP_NS: Final = 200_000
_CONDITION_BYTES: Final = 64  # sizeof(pthread_cond_t) is 48


class Busy(NamedTuple):
    """One use of a slot, as far as it overlaps the wait."""

    ns: int
    slot: int


def handed_ns(ctx: Context) -> int:
    """When the thread that read the request had come to rest, or begun to write: at the latest then it handed it on."""
    r = ctx.request
    since = max(r.recv_ns, r.start_ns)
    rest = ctx.timelines.thread(r.start_tid).next_block(since)
    return min(rest or since, answer_ns(ctx))


def answer_ns(ctx: Context) -> int:
    """When the answer began."""
    r = ctx.request
    return r.head_ns or r.first_ns or r.end_ns


# threads that work for a loop


def worker_threads(ctx: Context) -> Iterable[During]:
    """Yield the wait for a worker that finished somebody else's job after the hand-over, and then took this one up."""
    told = _notifications(ctx)
    handed, answer = handed_ns(ctx), answer_ns(ctx)
    by = _answered_by(told, answer, ctx)
    if by is None:
        return
    tid, until = by
    times = told[tid]
    mine = times[bisect_right(times, handed) : bisect_right(times, until)]
    if len(mine) < 2 or _was_idle(tid, max(ctx.request.recv_ns, ctx.request.start_ns), handed, ctx):
        return
    took = _taken_up(mine, ctx)
    if took - handed < MIN_NS or _rested(tid, took, ctx):
        return
    who = _culprit(told, (handed, took), "threads that work for the event loop", ctx)
    text = f"waited {(took - handed) / MS:.0f} ms for a worker thread: {who.detail}"
    yield During(handed, took, text, who, inferred=True)


def _answered_by(told: dict[int, list[int]], answer_ns: int, ctx: Context) -> tuple[int, int] | None:
    """Return (tid, time) of the worker from which the path came to the thread that answered."""
    segments = ctx.path.segments if ctx.path is not None else []
    for segment in reversed(segments):
        if segment.start_ns >= answer_ns or segment.tid in {ctx.request.start_tid, ctx.request.end_tid}:
            continue
        # It is told of at the entry of the call that wakes: the path's hop is some us later.
        return (segment.tid, min(segment.end_ns, answer_ns) + _HOP_NS) if segment.tid in told else None
    return None


def _rested(tid: int, after_ns: int, ctx: Context) -> bool:
    """Whether a thread rested after what it told, rather than taking up the next job: others feed it then.

    Who waits for the interpreter lock, as event loops do too, does not rest.
    """
    thread = ctx.timelines.thread(tid)
    left = thread.next_block(after_ns)
    if left is None or left - after_ns > AGAIN_NS:
        return False
    wait = thread.wait(thread.before(left + 1).at)
    if wait.syscall_nr in POLL:
        return True
    return wait.syscall_nr == _FUTEX and not _waits_there(ctx.request.start_tid, wait.arg0, ctx)


def _waits_there(tid: int, address: int, ctx: Context) -> bool:
    """Whether a thread waited at a futex near that address, such as the other half of a condition variable."""
    rows = ctx.timelines.rows_of(tid, "sched_switch_out")
    near = (
        np.abs(rows["arg0"].astype(np.int64) - address) < _CONDITION_BYTES if len(rows) else np.zeros(0, bool)
    )
    return bool((near & (rows["syscall_nr"] == _FUTEX)).any()) if len(rows) else False


def _notifications(ctx: Context) -> dict[int, list[int]]:
    """Return when each sibling told the serving thread of something, through a channel that it reads."""
    r, timelines = ctx.request, ctx.timelines
    since = np.uint64(max(r.start_ns - _BACK_NS, 0))
    parts: list[Events] = []
    read = timelines.rows_of(r.start_tid, "sock_recv")
    for key in np.unique(read["key"][(read["aux"] & 0xFF) == UNIX]).tolist() if len(read) else ():
        parts.append(timelines.keyed("sock_send", "peer", key))
    read = timelines.rows_of(r.start_tid, "edge_read")
    for key in np.unique(read["key"]).tolist() if len(read) else ():
        parts.append(timelines.keyed("edge_write", "key", key))
    found: dict[int, list[int]] = {}
    for rows in parts:
        if not len(rows):
            continue
        others = (rows["tgid"] == r.tgid) & (rows["tid"] != r.start_tid) & (rows["ts_ns"] >= since)
        for tid, ts in zip(rows["tid"][others].tolist(), rows["ts_ns"][others].tolist(), strict=True):
            if len(found) < _MAX_MEMBERS or tid in found:
                found.setdefault(tid, []).append(ts)
    return {tid: sorted(times) for tid, times in found.items()}


def _taken_up(times: list[int], ctx: Context) -> int:
    """Return when a worker took the request up, which told the loop of something at these times before the answer.

    That is at the last of them that was of another request's work: what the loop sent next was for that one. A job
    may tell of its progress, so that where nothing was sent, the first is taken: what was before it was not ours.
    """
    sent = ctx.timelines.rows_of(ctx.request.start_tid, "sock_send")
    if len(sent):
        sent = sent[np.isin(sent["aux"] & 0xFF, INET) & (sent["lport"] == ctx.request.server_port)]
    ts = sent["ts_ns"]
    for at, following in reversed(list(pairwise(times))):
        a, b = (int(ts.searchsorted(np.uint64(t), "right")) for t in (at, following))
        keys = sent["key"][a:b]
        if len(keys) and int(keys[0]) != ctx.request.cookie:
            return at
    return times[0]


def _was_idle(tid: int, since_ns: int, until_ns: int, ctx: Context) -> bool:
    """Whether a thread had nothing to do when the request came, and was woken for it."""
    thread = ctx.timelines.thread(tid)
    interval = thread.before(since_ns + 1)
    if interval.state != BLOCKED:
        return False
    wait = thread.wait(interval.at)
    woken = (
        wait.context == TASK and wait.waker_tid == ctx.request.start_tid and wait.end_ns <= until_ns + MIN_NS
    )
    return woken and wait.syscall_nr == _FUTEX and wait.end_ns - max(wait.start_ns, 0) >= IDLE_NS


# a server's own threads


def server_threads(ctx: Context) -> Iterable[During]:
    """Yield the wait of a connection for one of the threads that serve connections, each one at a time."""
    r, timelines = ctx.request, ctx.timelines
    if not r.recv_ns or r.recv_ns - r.start_ns < MIN_NS or timelines.thread(r.start_tid).poll_edges(EPOLL)[1]:
        return
    took = 0
    for name in ("sock_send", "sock_recv"):
        rows = timelines.rows_of(r.start_tid, name)
        if len(rows):
            rows = rows[(rows["ts_ns"] < np.uint64(r.recv_ns)) & (rows["lport"] == r.server_port)]
            rows = rows[rows["key"] != r.cookie]
            took = max(took, int(rows["ts_ns"][-1]) if len(rows) else 0)
    thread = timelines.thread(r.start_tid)
    until = r.recv_ns
    for _ in range(8):  # back over the last few things that it did before it read the request
        interval = thread.before(until)
        if interval.start_ns <= max(took, r.start_ns):
            if interval.state == BLOCKED and until - max(took, r.start_ns) >= MIN_NS:
                wait = thread.wait(interval.at)
                if wait.syscall_nr == _FUTEX:
                    return  # it had nothing to do: the request was elsewhere
                took = until
            break
        if interval.state == BLOCKED:
            wait = thread.wait(interval.at)
            if wait.syscall_nr == _FUTEX and wait.end_ns - wait.start_ns >= IDLE_NS:
                return
            if wait.syscall_nr != _FUTEX:
                took = max(took, until)
                break
        until = interval.start_ns
    if took - r.start_ns < MIN_NS:
        return
    busy = _serving(ctx)
    if len(busy) < 2:
        return
    who = _culprit(busy, (r.start_ns, took), "threads that serve connections", ctx)
    text = f"the connection waited {(took - r.start_ns) / MS:.0f} ms for a thread: {who.detail}"
    yield During(r.start_ns, took, text, who)


def _serving(ctx: Context) -> dict[int, list[int]]:
    """Return when each thread of the process sent something on connections of the request's port."""
    r = ctx.request
    rows = ctx.timelines.select("sock_send")
    if not len(rows):
        return {}
    rows = rows[(rows["tgid"] == r.tgid) & (rows["lport"] == r.server_port)]
    found: dict[int, list[int]] = {}
    for tid, ts in zip(rows["tid"].tolist(), rows["ts_ns"].tolist(), strict=True):
        found.setdefault(tid, []).append(ts)
    return found


def _culprit(uses: dict[int, list[int]], during: tuple[int, int], what: str, ctx: Context) -> Culprit:
    """Name the pool, by its threads' common name and number, and the thread that held its slot longest."""
    tids = sorted(uses)
    tgid = ctx.request.tgid
    names = [ctx.thread_label(tid, tgid) for tid in tids]
    prefix = re.sub(r"[-_ ]?\d+$", "", max(names, key=names.count))
    longest = max((_longest(uses[tid], tid, *during) for tid in tids), default=Busy(0, tids[0]))
    holder = ctx.thread_label(longest.slot, tgid)
    detail = f"all {len(tids)} {what} busy, longest {holder} ({longest.slot}) for {longest.ns / MS:.0f} ms in one piece"
    return Culprit(kind="thread", name=prefix, tgid=tgid, tid=longest.slot, detail=detail)


def _longest(times: list[int], slot: int, start_ns: int, end_ns: int) -> Busy:
    """Return the longest stretch between two signs of life of a slot that overlaps the wait."""
    edges = [start_ns, *(t for t in times if start_ns - _BACK_NS <= t), end_ns]
    found = [Busy(b - a, slot) for a, b in pairwise(sorted(edges)) if b > start_ns and a < end_ns]
    return max(found, default=Busy(0, slot))
