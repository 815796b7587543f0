"""Makes a snapshot every so often and hands it on, encoded: OTLP's metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from opentelemetry.sdk.resources import Resource
from whyspan import clock

from whyspan_exporters.metrics import otlp, snapshot
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.snapshot import Fresh
from whyspan_exporters.metrics.temporality import DELTAS, Deltas

log = logging.getLogger("whyspan.otlp")

#: Takes a serialised ``ExportMetricsServiceRequest`` and the number of its points; must not wait for a receiver.
Put = Callable[[bytes, int], None]
_JOIN_S: Final = 1.0


class Push:
    """A thread of its own, so that neither a disk nor a long table of figures holds findings up."""

    def __init__(
        self,
        figures: Figures,
        resource: Resource,
        put: Put,
        interval_s: float,
        temporality: str = "cumulative",
    ) -> None:
        """Start the thread.

        Args:
            figures: What to report.
            resource: Who reports.
            put: Where to.
            interval_s: Between two snapshots; there is another one at the end.
            temporality: One of `temporality.DELTAS`.
        """
        self._figures, self._resource, self._put, self._interval_s = figures, resource, put, interval_s
        self._deltas = Deltas(DELTAS[temporality], figures.started_unix_ns)
        self._fresh = Fresh()
        self._broken = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="whyspan-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand on the last figures, and end."""
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(self._interval_s)
            try:
                taken = snapshot.take(self._figures, clock.now_unix_ns())
                out = self._fresh.of(self._deltas.of(taken), taken)
                payload, items = otlp.encode(out, self._resource)
                if items:
                    self._put(payload, items)
            except Exception:
                # A defect of ours; the next snapshot may do.
                if not self._broken:
                    log.exception("otlp: no metrics this time")
                self._broken = True
