"""The recorder: the last events, bounded in time and bytes, as the batches they came in."""

from __future__ import annotations

from collections import deque

from whyspan_probes.schema import Events

from whyspan.model import Batch

#: Memory per event: a live batch is a view of whole ring records, header included.
KEPT_BYTES = 64


class Recorder:
    """Keeps whole batches; the oldest go when either bound is passed.

    ``evicted_events`` counts what the byte bound (not the window) took.
    """

    def __init__(self, window_ns: int, max_bytes: int) -> None:
        self._window_ns, self._max_bytes = window_ns, max_bytes
        self._chunks: deque[tuple[int, int, Events]] = deque()  # first and last ts_ns, events
        self._lost: deque[tuple[int, int, int]] = deque()  # from, to, records lost between
        self._last_now_ns = 0
        self._bytes = 0
        self.evicted_events = 0

    def resize(self, window_ns: int, max_bytes: int) -> None:
        """Keep as much from now on; what is too much goes with the next batch."""
        self._window_ns, self._max_bytes = window_ns, max_bytes

    def add(self, batch: Batch) -> None:
        """Take in a batch."""
        events = batch.events
        if len(events):
            self._chunks.append((int(events["ts_ns"][0]), int(events["ts_ns"][-1]), events))
            self._bytes += len(events) * KEPT_BYTES
        lost = sum(batch.lost.values())
        if lost:
            self._lost.append((self._last_now_ns, batch.now_ns, lost))
        self._last_now_ns = batch.now_ns
        horizon = batch.now_ns - self._window_ns
        while self._chunks and (self._chunks[0][1] < horizon or self._bytes > self._max_bytes):
            _, last, old = self._chunks.popleft()
            self._bytes -= len(old) * KEPT_BYTES
            if last >= horizon:
                self.evicted_events += len(old)
        while self._lost and self._lost[0][1] < horizon:
            self._lost.popleft()

    def oldest_ns(self) -> int:
        """Return the time of the oldest event kept; 0 when there is none."""
        return self._chunks[0][0] if self._chunks else 0

    def span(self, start_ns: int, end_ns: int) -> list[Events]:
        """Return the chunks that overlap the interval, in order. Each is sorted by time."""
        return [events for first, last, events in self._chunks if last >= start_ns and first <= end_ns]

    def lost(self, start_ns: int, end_ns: int) -> int:
        """Return how many records were lost in the batches that overlap the interval."""
        return sum(n for first, last, n in self._lost if last >= start_ns and first <= end_ns)
