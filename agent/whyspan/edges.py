"""Data edges: which thread wrote what another thread read, over eventfd, pipe, unix and loopback sockets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

import numpy as np

from whyspan.index import PORTS
from whyspan.threads import Timelines

UNIX: Final = 1
_INET: Final = (2, 10)
# Reads tried, nearest first, before a run is taken to have needed no data.
_READS_TRIED: Final = 16
_WRITES_TRIED: Final = 64
# How much later than its reader's a sender's stamp may be.
_STAMP_NS: Final = 1_000_000


class Edge(NamedTuple):
    """A read and the write that fed it; ``write_ns`` < ``read_ns``."""

    read_ns: int
    write_ns: int
    tid: int
    tgid: int


class Delivery(NamedTuple):
    """Who read a message, and when."""

    read_ns: int
    tid: int
    tgid: int


class _Read(NamedTuple):
    ts: int
    kind: str  # edge, unix, inet
    key: int
    value: int  # unix: the peer's key; inet: the writer's ports
    offset: int
    size: int


class _Writes(NamedTuple):
    ts: list[int]
    tid: list[int]
    tgid: list[int]
    offset: list[int]
    end: list[int]


class Edges:
    """Finds the writes behind a thread's reads. Memoises per thread and per channel."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self._reads: dict[int, tuple[list[int], list[_Read]]] = {}
        self._writes: dict[tuple[str, int], _Writes] = {}
        self._read_ts: dict[tuple[str, int], list[int]] = {}

    def reads_in(self, tid: int, after_ns: int, until_ns: int) -> bool:
        """Return whether the thread read anything in (after, until]."""
        ts, _ = self._reads_of(tid)
        i = bisect_right(ts, until_ns)
        return i > 0 and ts[i - 1] > after_ns

    def latest(
        self, tid: int, read_after_ns: int, written_after_ns: int, before_ns: int, own: frozenset[int]
    ) -> Edge | None:
        """Return the edge into the thread's nearest read in (read_after, before] that has one.

        An edge from a thread of *own* is preferred to a nearer one from any other. Writes at or before
        *written_after* are left to the wake-up they caused.
        """
        ts, reads = self._reads_of(tid)
        i = bisect_right(ts, before_ns) - 1
        best: Edge | None = None
        for k in range(i, max(i - _READS_TRIED, -1), -1):
            if ts[k] <= read_after_ns:
                break
            edge = self._writer(tid, reads[k], written_after_ns, own)
            if edge is None or edge.write_ns >= before_ns:
                continue
            if edge.tid in own:
                return edge
            best = best or edge
        return best

    def first(self, tid: int, after_ns: int, own: frozenset[int]) -> Edge | None:
        """Return the edge into the thread's first read at or after a moment, or None."""
        ts, reads = self._reads_of(tid)
        i = bisect_left(ts, after_ns)
        return self._writer(tid, reads[i], 0, own) if i < len(reads) else None

    def received(self, tid: int) -> list[tuple[int, Edge]]:
        """Return (time, edge) of every read of a socket whose writer is seen, in time order."""
        _, reads = self._reads_of(tid)
        out = []
        for read in reads:
            edge = self._writer(tid, read, 0, frozenset()) if read.kind != "edge" else None
            if edge is not None:
                out.append((read.ts, edge))
        return out

    def sent(self, tid: int, since_ns: int, until_ns: int) -> list[Delivery]:
        """Return who read what the thread sent on unix and loopback sockets in [since, until], in order of sending."""
        rows = self._timelines.rows_of(tid, "sock_send")
        if not len(rows):
            return []
        ts = rows["ts_ns"]
        a, b = (
            int(ts.searchsorted(np.uint64(since_ns), "left")),
            int(ts.searchsorted(np.uint64(until_ns), "right")),
        )
        out = []
        for row in rows[a : min(b, a + _READS_TRIED)]:
            if int(row["aux"]) & 0xFF == UNIX:
                reads = self._timelines.keyed("sock_recv", "key", int(row["peer"]))
            else:
                ports = int(row["rport"]) << 16 | int(row["lport"])
                reads = self._timelines.keyed("sock_recv", PORTS, ports)
            if not len(reads):
                continue
            # A send is stamped at its end: the reader may have had the bytes before.
            begun = np.uint64(max(int(row["ts_ns"]) - _STAMP_NS, 0))
            i = int((reads["offset"] + reads["bytes"]).searchsorted(row["offset"], "right"))
            if i == len(reads) or reads["ts_ns"][i] < begun:  # offsets that do not meet: one side was lost
                i = int(reads["ts_ns"].searchsorted(begun, "left"))
            if i < len(reads):
                out.append(Delivery(int(reads["ts_ns"][i]), int(reads["tid"][i]), int(reads["tgid"][i])))
        return out

    def _reads_of(self, tid: int) -> tuple[list[int], list[_Read]]:
        found = self._reads.get(tid)
        if found is not None:
            return found
        reads: list[_Read] = []
        rows = self._timelines.rows_of(tid, "edge_read")
        if len(rows):
            for t, key, size in zip(
                rows["ts_ns"].tolist(), rows["key"].tolist(), rows["bytes"].tolist(), strict=True
            ):
                if size > 0:  # not EAGAIN
                    reads.append(_Read(t, "edge", key, key, 0, size))
        rows = self._timelines.rows_of(tid, "sock_recv")
        if len(rows):
            names = ("ts_ns", "aux", "key", "peer", "offset", "bytes", "lport", "rport")
            for t, aux, key, peer, offset, size, lport, rport in zip(
                *(rows[n].tolist() for n in names), strict=True
            ):
                family = aux & 0xFF
                if family == UNIX and peer and size:
                    reads.append(_Read(t, "unix", key, peer, offset, size))
                elif family in _INET and size:
                    reads.append(_Read(t, "inet", key, rport << 16 | lport, offset, size))
        reads.sort(key=lambda r: r.ts)
        found = self._reads[tid] = [r.ts for r in reads], reads
        return found

    def _writer(self, tid: int, read: _Read, after_ns: int, own: frozenset[int]) -> Edge | None:
        writes = self._writes_of(read.kind, read.value)
        first, last = self._candidates(read, writes)
        found: Edge | None = None
        for k in range(first, min(last, first + _WRITES_TRIED)):
            # A socket write is stamped at its end, which may come after the reader has the bytes.
            at = min(writes.ts[k], read.ts)
            if writes.tid[k] == tid or at <= after_ns:
                continue
            edge = Edge(read.ts, at, writes.tid[k], writes.tgid[k])
            if edge.tid in own:
                return edge
            found = found or edge
        return found

    def _candidates(self, read: _Read, writes: _Writes) -> tuple[int, int]:
        if read.kind != "edge":
            first = bisect_right(writes.end, read.offset)
            last = bisect_left(writes.offset, read.offset + read.size)
            if first < last:
                return first, last
        # No byte offsets, or none that meet: what was written since the previous read of this channel.
        earlier = self._reads_on(read)
        i = bisect_left(earlier, read.ts)
        previous = earlier[i - 1] if i else 0
        return bisect_right(writes.ts, previous), bisect_right(writes.ts, read.ts)

    def _writes_of(self, kind: str, value: int) -> _Writes:
        writes = self._writes.get((kind, value))
        if writes is not None:
            return writes
        if kind == "edge":
            rows = self._timelines.keyed("edge_write", "key", value)
            rows = rows[rows["bytes"] > 0] if len(rows) else rows
            offsets: list[int] = []
            ends: list[int] = []
        else:
            rows = self._timelines.keyed("sock_send", PORTS if kind == "inet" else "key", value)
            offsets = rows["offset"].tolist() if len(rows) else []
            ends = (rows["offset"] + rows["bytes"]).tolist() if len(rows) else []
        writes = _Writes(rows["ts_ns"].tolist(), rows["tid"].tolist(), rows["tgid"].tolist(), offsets, ends)
        self._writes[kind, value] = writes
        return writes

    def _reads_on(self, read: _Read) -> list[int]:
        found = self._read_ts.get((read.kind, read.key))
        if found is None:
            name = "edge_read" if read.kind == "edge" else "sock_recv"
            rows = self._timelines.keyed(name, "key", read.key)
            rows = rows[rows["bytes"] > 0] if len(rows) else rows
            found = self._read_ts[read.kind, read.key] = rows["ts_ns"].tolist()
        return found
