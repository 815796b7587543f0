"""Messages that a spinning thread polls for: no wake-up tells when they came, the thread that took them in does.

An engine core that spins on shared memory, or a busy scheduler that polls a queue, never sleeps. Beside it a thread
of its own process receives from the other process and comes to rest: from then on the message could be seen.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

import numpy as np

from whyspan.edges import Edge, Edges
from whyspan.model import Request
from whyspan.threads import Timelines

# Writes of the front end that are followed, first to last, to find the one that hands the request over.
_WRITES_TRIED: Final = 32


class _Message(NamedTuple):
    at_ns: int  # when it could be seen
    tid: int  # the thread that took it in


class Inboxes:
    """What each process received from other processes of its service. Memoises per process."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines, self._edges = timelines, timelines.shared(Edges)
        self._by_process: dict[int, tuple[list[int], list[_Message]]] = {}

    def latest(self, tid: int, tgid: int, after_ns: int, before_ns: int) -> Edge | None:
        """Return the newest message in (after, before) that another thread of the process took in, as an edge."""
        at, messages = self._of(tgid)
        for k in range(bisect_left(at, before_ns) - 1, -1, -1):
            if at[k] <= after_ns:
                break
            if messages[k].tid != tid:
                return Edge(at[k], at[k], messages[k].tid, tgid)
        return None

    def _of(self, tgid: int) -> tuple[list[int], list[_Message]]:
        found = self._by_process.get(tgid)
        if found is None:
            rows = self._timelines.select("sock_recv")
            readers = np.unique(rows["tid"][rows["tgid"] == tgid]).tolist()
            messages = sorted({m for tid in readers for m in self._received(tid, tgid)})
            found = self._by_process[tgid] = [m.at_ns for m in messages], messages
        return found

    def _received(self, tid: int, tgid: int) -> list[_Message]:
        facts = self._timelines.facts
        out = []
        for read_ns, writer in self._edges.received(tid):
            if writer.tgid != tgid and facts.service(writer.tgid) == facts.service(tgid):
                out.append(settled(self._timelines, tid, tgid, read_ns))
        return out


def settled(timelines: Timelines, tid: int, tgid: int, read_ns: int) -> _Message:
    """Return when a message that *tid* read could be seen by the rest of its process, and by whose work.

    That is when the reader comes to rest, or, when it passed the message on through an eventfd or a pipe, when that
    one's reader does.
    """
    rest = timelines.thread(tid).next_block(read_ns) or read_ns
    for key in _written(timelines, tid, read_ns, rest):
        taken = _first_read(timelines, key, read_ns, tid, tgid)
        if taken is not None:
            at, reader = taken
            return _Message(max(timelines.thread(reader).next_block(at) or at, rest), reader)
    return _Message(rest, tid)


def handover(timelines: Timelines, request: Request) -> tuple[int, int, int] | None:
    """Return (time, tid, tgid) at which another process of the service had the request, or None.

    The front end's thread writes to a thread of its own that sends (or sends itself); the process at the other end
    belongs to the same service. What came before is the front end's, what comes after the engine's, which works for
    other requests at the same time: without this cut the walk would pass the front end by.
    """
    since, until = max(request.recv_ns, request.start_ns), request.first_ns or request.end_ns
    found = _sent(timelines, request.start_tid, request.tgid, (since, until))
    tried = 0
    rows = timelines.rows_of(request.start_tid, "edge_write")
    if len(rows):
        a = int(rows["ts_ns"].searchsorted(np.uint64(since), "left"))
        for ts, key in zip(rows["ts_ns"][a:].tolist(), rows["key"][a:].tolist(), strict=True):
            if ts > until or tried >= _WRITES_TRIED or (found is not None and ts > found[0]):
                break
            tried += 1
            taken = _first_read(timelines, key, ts, request.start_tid, request.tgid)
            if taken is None or taken[0] > until:
                continue
            at, sender = taken
            rest = timelines.thread(sender).next_block(at) or until
            passed = _sent(timelines, sender, request.tgid, (at, min(rest, until)))
            if passed is not None:
                found = passed
                break
    return found if found is not None and since < found[0] < until else None


def _sent(timelines: Timelines, tid: int, tgid: int, during: tuple[int, int]) -> tuple[int, int, int] | None:
    facts = timelines.facts
    for read in timelines.shared(Edges).sent(tid, *during):
        if read.tgid != tgid and facts.service(read.tgid) == facts.service(tgid):
            message = settled(timelines, read.tid, read.tgid, read.read_ns)
            return message.at_ns, message.tid, read.tgid
    return None


def _written(timelines: Timelines, tid: int, since: int, until: int) -> list[int]:
    rows = timelines.rows_of(tid, "edge_write")
    if not len(rows):
        return []
    a, b = (int(rows["ts_ns"].searchsorted(np.uint64(t), "left")) for t in (since, until))
    keys: list[int] = rows["key"][a:b].tolist()
    return keys[:_WRITES_TRIED]


def _first_read(timelines: Timelines, key: int, since: int, writer: int, tgid: int) -> tuple[int, int] | None:
    """Return (time, tid) of the first successful read of a channel by another thread of the process."""
    rows = timelines.keyed("edge_read", "key", key)
    if not len(rows):
        return None
    a = int(rows["ts_ns"].searchsorted(np.uint64(since), "left"))
    for ts, tid, owner, size in zip(
        *(rows[n][a : a + _WRITES_TRIED].tolist() for n in ("ts_ns", "tid", "tgid", "bytes")), strict=True
    ):
        if size > 0 and tid != writer:
            return (ts, tid) if owner == tgid else None
    return None
