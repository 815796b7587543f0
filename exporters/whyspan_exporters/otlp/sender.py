"""Sends spans from a bounded queue in a thread of its own, so that a slow or absent collector holds nothing up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from whyspan_exporters.otlp.delivery import Delivery, Reasons

log = logging.getLogger("whyspan.otlp")

MAX_SPANS: Final = 2048  # some 7 MB
BATCH_SPANS: Final = 512
DELAY_S: Final = 1.0
_ABORT_S: Final = 0.5


class Sender:
    """``offered = sent + failed + dropped + queued`` always holds, in spans.

    Failed: the SDK gave up after its retries. Dropped: the queue was full, the oldest go first, or the process ended.
    """

    def __init__(
        self,
        make: Callable[[], SpanExporter],
        delivery: Delivery,
        reasons: Reasons,
        *,
        max_spans: int = MAX_SPANS,
        batch_spans: int = BATCH_SPANS,
        delay_s: float = DELAY_S,
    ) -> None:
        """Start the thread; *make* is called in it.

        Args:
            make: Makes the exporter; called again for the next batch when it raises.
            delivery: Takes the counts.
            reasons: Knows why an export failed.
            max_spans: Bound of the queue.
            batch_spans: Sent in one request, at least when there are so many.
            delay_s: A span waits at most so long for others.
        """
        self._make, self._delivery, self._reasons = make, delivery, reasons
        self._max_spans, self._batch_spans, self._delay_s = max_spans, batch_spans, delay_s
        self._condition = threading.Condition()
        self._queue: deque[Sequence[ReadableSpan]] = deque()  # one entry per finding: its spans stay together
        self._queued = self._in_flight = 0
        self._due_s = 0.0
        self._closing = self._aborted = False
        self._exporter: SpanExporter | None = None
        self._thread = threading.Thread(target=self._run, name="whyspan-otlp", daemon=True)
        self._thread.start()

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        """Queue the spans of one finding. Never waits."""
        lost = 0
        with self._condition:
            if self._closing:
                lost = len(spans)
            else:
                if not self._queue:
                    self._due_s = time.monotonic() + self._delay_s
                self._queue.append(spans)
                self._queued += len(spans)
            while self._queued > self._max_spans:
                lost += len(self._queue[0])
                self._queued -= len(self._queue.popleft())
            self._condition.notify()
        if lost:
            self._delivery.dropped(lost)

    def queued(self) -> int:
        """Return the number of spans that wait or are on their way."""
        with self._condition:
            return self._queued + self._in_flight

    def close(self, timeout_s: float) -> None:
        """Send what is queued for at most *timeout_s*, then give up on the rest and count it."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(timeout_s)
        with self._condition:
            self._aborted = True
            exporter = self._exporter
            left, self._queued = self._queued, 0
            self._queue.clear()
        if left:
            self._delivery.dropped(left)
        if exporter is not None:
            exporter.shutdown()  # ends its wait for the next try
        self._thread.join(_ABORT_S)
        if left or self._in_flight:
            log.warning("otlp: %d spans were not sent before the end", left + self._in_flight)

    def _run(self) -> None:
        while batch := self._next():
            reason = self._export(batch)
            if reason is None:
                self._delivery.sent(len(batch))
            else:
                self._delivery.failed(len(batch), reason)
            with self._condition:
                self._in_flight = 0

    def _next(self) -> list[ReadableSpan]:
        """Wait for a batch and return it; an empty one when it is over."""
        with self._condition:
            while not self._closing:
                left_s = self._due_s - time.monotonic()
                if self._queue and (self._queued >= self._batch_spans or left_s <= 0):
                    break
                self._condition.wait(left_s if self._queue else None)
            batch: list[ReadableSpan] = []
            while self._queue and len(batch) < self._batch_spans and not self._aborted:
                batch += self._queue.popleft()
            self._queued -= len(batch)
            self._in_flight = len(batch)
            return batch

    def _export(self, batch: list[ReadableSpan]) -> str | None:
        """Send *batch*; returns None, or why it failed as far as that is known."""
        self._reasons.take()
        try:
            if self._exporter is None:
                self._exporter = self._make()
            result = self._exporter.export(batch)
        except Exception as exc:
            # The SDK lets through what it did not foresee: a header that is no latin-1, an unknown compression.
            return f"{type(exc).__name__}: {exc}"
        return None if result is SpanExportResult.SUCCESS else self._reasons.take()
