"""What every thread was doing at any moment: the timelines of a window, decoded as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from whyspan_probes.schema import Events, Schema, take

from whyspan.facts import Facts
from whyspan.index import ChunkIndex, index_of, joined
from whyspan.timeline import Layout, ThreadTimeline

#: Events this long before a window are part of it: what woke, fed or delayed its first steps.
NEAR_NS: Final = 200_000_000


T = TypeVar("T")


class Timelines:
    """The threads of a window, decoded as they are asked for.

    Args:
        schema: Names and layouts of the events.
        chunks: Successive EVENT arrays, each sorted by time, up to the window's end. Those that end more than
            NEAR_NS before its start are looked into only for what a thread did last before it. The arrays are
            indexed once and must not change.
        start_ns: Start of the interval to be explained, CLOCK_MONOTONIC.
        end_ns: Its end.
        facts: What is known of processes and descriptors.
    """

    def __init__(
        self, schema: Schema, chunks: Sequence[Events], start_ns: int, end_ns: int, facts: Facts
    ) -> None:
        self.schema = schema
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.facts = facts
        arrays = [c for c in chunks if len(c)]
        first = next(
            (i for i, c in enumerate(arrays) if int(c["ts_ns"][-1]) >= start_ns - NEAR_NS), len(arrays)
        )
        # Kept: an index only refers to its array.
        self._arrays, self._older = arrays[first:], arrays[:first][::-1]
        self._chunks: list[ChunkIndex] = [index_of(c, schema) for c in self._arrays]
        self._memo: dict[Any, Any] = {}  # what others derive from these timelines, by its maker
        self._layout = Layout(schema)
        self._fd_kind = schema.kind("fd_block")
        self._threads: dict[int, ThreadTimeline] = {}
        self._rows: dict[int, Events] = {}
        self._rows_of: dict[tuple[int, str], Events] = {}
        self._longer: set[int] = set()
        self._keyed: dict[tuple[str, str, int], Events] = {}
        self._selected: dict[str, Events] = {}
        self._switches: dict[int, Events] = {}
        self._members: dict[int, int] | None = None

    def shared(self, make: Callable[[Timelines], T]) -> T:
        """Return what *make* derives from these timelines, made once for all who ask."""
        if make not in self._memo:
            self._memo[make] = make(self)
        found: T = self._memo[make]
        return found

    @property
    def event_count(self) -> int:
        """Number of events in the window's chunks."""
        return sum(len(c) for c in self._arrays)

    def rows(self, tid: int) -> Events:
        """Return every event whose subject is the thread, in time order, undecoded."""
        rows = self._rows.get(tid)
        if rows is None:
            rows = self._rows[tid] = joined([c.rows(tid) for c in self._chunks])
        return rows

    def _before(self, tid: int) -> list[Events]:
        """The thread's rows in the older chunks, back to the youngest one with a switch of it."""
        out, into, _ = self._layout.kinds
        found: list[Events] = []
        for chunk in self._older:
            # Scanned, not indexed: this is rare, and an index costs a hundred scans.
            part = take(chunk, chunk["tid"] == tid)
            if len(part):
                found.insert(0, part)
                if ((part["kind"] == out) | (part["kind"] == into)).any():
                    break
        return found

    def rows_of(self, tid: int, name: str) -> Events:
        """Return the thread's events of one kind with their own layout, in time order."""
        key = tid, name
        rows = self._rows_of.get(key)
        if rows is None:
            rows = self._rows_of[key] = self.schema.select(self.rows(tid), name)
        return rows

    def thread(self, tid: int) -> ThreadTimeline:
        """Return the timeline of a thread; an empty one when nothing was seen of it."""
        thread = self._threads.get(tid)
        if thread is None:
            fd = self.schema.types["fd_block"].dtype if self._fd_kind >= 0 else None
            thread = ThreadTimeline(tid, self.rows(tid), self._layout, self._fd_kind, fd)
            self._threads[tid] = thread
        return thread

    def longer(self, tid: int) -> ThreadTimeline:
        """Return the timeline of a thread with what it did last before the window; for one that began it asleep."""
        if tid not in self._longer:
            self._longer.add(tid)
            older = self._before(tid)
            if older:
                self._rows[tid] = joined([*older, self.rows(tid)])
                self._threads.pop(tid, None)
                self._rows_of = {k: rows for k, rows in self._rows_of.items() if k[0] != tid}
        return self.thread(tid)

    def watched(self, tid: int) -> bool:
        """Return whether the thread's context switches are seen."""
        return tid != 0 and self.thread(tid).known

    def keyed(self, name: str, field: str, value: int) -> Events:
        """Return the events of kind *name* whose *field* (or PORTS) is *value*, in time order."""
        key = (name, field, value)
        rows = self._keyed.get(key)
        if rows is None:
            if name in self.schema.types:
                parts = [c.table(name, field, value) for c in self._chunks]
                rows = joined(parts, self.schema.types[name].dtype)
            else:
                rows = joined([])
            self._keyed[key] = rows
        return rows

    def keyed_since(self, name: str, field: str, value: int, since_ns: int) -> Events:
        """Return the same as `keyed`, and what is older than the window, back to *since_ns*; of rare events only."""
        parts = [self.keyed(name, field, value)]
        for chunk in self._older:
            if int(chunk["ts_ns"][-1]) < since_ns:
                break
            rows = self.schema.select(chunk, name)
            if len(rows):
                parts.insert(0, take(rows, rows[field] == value))
        return joined(parts, parts[0].dtype)

    def select(self, name: str) -> Events:
        """Return all events of one kind, in time order, with their own layout."""
        rows = self._selected.get(name)
        if rows is None:
            if name in self.schema.types:
                parts = [self.schema.select(c, name) for c in self._arrays]
                rows = joined(parts, self.schema.types[name].dtype)
            else:
                rows = joined([])
            self._selected[name] = rows
        return rows

    def members(self) -> dict[int, int]:
        """Return tid to tgid of every thread seen switching: the watched ones."""
        if self._members is None:
            self._members = {}
            out, into, _ = self._layout.kinds
            for chunk in self._arrays:
                kind = chunk["kind"]
                seen = np.flatnonzero((kind == out) | (kind == into))
                tids, first = np.unique(chunk["tid"][seen], return_index=True)
                self._members.update(zip(tids.tolist(), chunk["tgid"][seen[first]].tolist(), strict=True))
        return self._members

    def occupancy(self, cpu: int, start_ns: int, end_ns: int) -> dict[tuple[int, int], int]:
        """Return nanoseconds on a CPU in an interval by (tid, tgid); tid 0 is the idle task.

        Threads that are not watched show where they hand over to, or take over from, a watched one; a
        hand-over between two of them is not seen, and the time is split evenly between both.
        """
        if self._layout.out is None or self._layout.into is None:
            return {}
        rows = self._switches.get(cpu)
        if rows is None:
            rows = self._switches[cpu] = joined([c.switches(cpu) for c in self._chunks])
        ts = rows["ts_ns"]
        a = int(ts.searchsorted(np.uint64(max(start_ns, 0)), "left"))
        b = int(ts.searchsorted(np.uint64(max(end_ns, 0)), "right"))
        rows = rows[a:b]
        out_kind = self._layout.kinds[0]
        used: dict[tuple[int, int], int] = {}
        owner: tuple[int, int] | None = None
        last = start_ns
        outs, ins = rows.view(self._layout.out), rows.view(self._layout.into)
        left = rows["kind"] == out_kind
        columns = (
            rows["ts_ns"],
            left,
            rows["tid"],
            rows["tgid"],
            np.where(left, outs["next_tid"], ins["prev_tid"]),
            np.where(left, outs["next_tgid"], ins["prev_tgid"]),
        )
        for t, leaves, tid, tgid, other, other_tgid in zip(*(c.tolist() for c in columns), strict=True):
            subject, partner = (tid, tgid), (other, other_tgid)
            ran, now = (subject, partner) if leaves else (partner, subject)
            _share(used, ran, owner, t - last)
            owner, last = now, t
        if owner is not None:
            _share(used, owner, None, end_ns - last)
        return used


def _share(
    used: dict[tuple[int, int], int], ran: tuple[int, int], other: tuple[int, int] | None, ns: int
) -> None:
    if ns <= 0:
        return
    if other is not None and other != ran:
        used[other] = used.get(other, 0) + ns // 2
        ns -= ns // 2
    used[ran] = used.get(ran, 0) + ns
