"""What the metrics report, as the collector's counts, states and findings told it last. Thread-safe, bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from whyspan import clock
from whyspan.tally import Series

from whyspan_exporters.metrics import losses
from whyspan_exporters.metrics.exemplars import Exemplars
from whyspan_exporters.metrics.found import Found
from whyspan_exporters.metrics.instrument import Buckets, Exemplar, Point
from whyspan_exporters.metrics.latencies import Latencies
from whyspan_exporters.metrics.states import engines, label, number, probes, table
from whyspan_exporters.metrics.totals import Key, Totals
from whyspan_exporters.records import EXPORTER, Counts, Explained, Status

__all__ = ["FRESH_S", "Figures", "engines", "label", "number", "probes", "table"]

#: A collector that has said nothing for so long is taken for gone.
FRESH_S: Final = 30.0


class Figures:
    """Values come from another process: anything that is no number counts as absent."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        own: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
    ) -> None:
        """Begin with nothing known.

        Args:
            now_s: A clock in s.
            own: Sinks whose state is asked for when it is needed, instead of taken from the exporter's last state.
        """
        self._now_s, self._own = now_s, own or {}
        self._lock = threading.Lock()
        self._totals = Totals()
        self._latencies = Latencies()
        self._found = Found()
        self._exemplars = Exemplars()
        self._culprits = losses.Culprits()
        self._collector: Mapping[str, Any] = {}
        self._collector_at_s = float("-inf")
        self._exporter: Mapping[str, Any] = {}
        self.started_unix_ns = clock.now_unix_ns()
        self._counting_since_unix_ns = 0

    def add(self, record: Explained | Counts | Status) -> None:
        """Take in what the collector, or the exporter itself, says."""
        with self._lock:
            if isinstance(record, Explained):
                losses.add(record, self._found, self._exemplars, self._culprits)
            elif isinstance(record, Counts):
                values = {(c.name, label(c.service), label(c.label)): float(c.value) for c in record.counts}
                self._totals.put(record.instance, values)
            elif record.instance == EXPORTER:
                self._exporter = record.status
            else:
                self._add_state(record.instance, record.status)

    def _add_state(self, instance: str, status: Mapping[str, Any]) -> None:
        self._collector, self._collector_at_s = status, self._now_s()
        self._totals.put(instance, _state_totals(status))
        self._latencies.put(instance, status.get("latencies"))
        if not self._counting_since_unix_ns:
            up_s = number(status.get("uptime_s"))
            self._counting_since_unix_ns = clock.now_unix_ns() - int(max(up_s or 0.0, 0.0) * 1e9)

    def totals(self, name: str) -> list[tuple[str, str, float]]:
        """Return (service, label, total) of everything counted as *name*."""
        with self._lock:
            return self._totals.of(name)

    def histograms(self, name: str) -> list[tuple[Series, Buckets, tuple[Exemplar, ...]]]:
        """Return the histograms of all requests, of *name* (duration, ttft, per_token), with exemplars."""
        with self._lock:
            found = self._latencies.all(name)
            return [(s, b, self._exemplars.of(name, s, found)) for s, b in found.items()]

    def found(self, name: str) -> list[Point]:
        """Return what explained requests told, of a metric by its name."""
        with self._lock:
            return self._found.points(name)

    def since_unix_ns(self, source: str) -> int:
        """Return since when the counts of a source (collector, exporter, spool) go on without a gap; 0: not known.

        The collector counts on while only the exporter restarts, so it is the first collector's start. The spool's
        counts outlive both.
        """
        if source == "spool":
            return 0
        with self._lock:
            counting = self._counting_since_unix_ns
        return counting if source == "collector" and counting else self.started_unix_ns

    def collector(self) -> Mapping[str, Any]:
        """Return the collector's last state; empty when it has gone."""
        with self._lock:
            return self._collector if self._now_s() - self._collector_at_s < FRESH_S else {}

    def exporter(self) -> Mapping[str, Any]:
        """Return the exporter's last state."""
        with self._lock:
            return self._exporter

    def sink(self, name: str) -> Mapping[str, Any]:
        """Return the state of one of the exporter's sinks; empty when there is none."""
        if name in self._own:
            return self._own[name]()
        return table(table(self.exporter(), "sinks"), name)


def _state_totals(status: Mapping[str, Any]) -> dict[Key, float]:
    # What the state says since the start of its process: these restart with it, like the counts.
    out: dict[Key, float] = {}
    for name, probe in probes(status):
        for field in ("events", "drops", "missed"):
            if (value := number(probe.get(field))) is not None:
                out[f"probe_{field}", "", name] = value
    for field in ("cpu_s", "findings_dropped"):
        if (value := number(status.get(field))) is not None:
            out[field, "", ""] = value
    return out
