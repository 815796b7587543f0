"""The OTLP sink: chooses what leaves the host, and keeps sender and metrics running."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from whyspan import clock
from whyspan.config import Otlp
from whyspan.model import FAILED, Finding

from whyspan_exporters.metrics import temporality
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.push import Push
from whyspan_exporters.otlp import cold_start, transport
from whyspan_exporters.otlp.encode import encode
from whyspan_exporters.otlp.outbox import Outbox
from whyspan_exporters.otlp.resource import Resources
from whyspan_exporters.otlp.settings import Settings
from whyspan_exporters.otlp.spans import to_spans
from whyspan_exporters.records import Explained, Record, Status
from whyspan_exporters.resends import Resends

log = logging.getLogger("whyspan.otlp")

# Well below the 5 s that the supervisor gives: the rest of the exporter has to end too. What is left stays on disk.
_CLOSE_S: Final = 0.7
_REMEMBERED: Final = 4096  # starts of engines


class OtlpSink:
    """Never blocks the exporter's loop: what leaves the host goes into the outbox's spool, and from there by itself."""

    def __init__(self, settings: Settings, section: Otlp, spool: Path | None = None) -> None:
        """Open the outbox. Threads start at the first `emit`: capabilities are dropped by then, per thread.

        Args:
            settings: Where to send, and how.
            section: What to send.
            spool: The spool's file; None keeps what waits in memory only.
        """
        self._settings, self._section = settings, section
        self._started = False
        self._resources = Resources()
        self._figures = Figures(own={"otlp": self.status})
        self._temporality, problem = temporality.preference(section.metrics_temporality, os.environ)
        if problem:
            log.error("otlp: %s", problem)
        targets = [t for t in (settings.traces, settings.metrics) if t is not None]
        self._outbox = Outbox(targets, spool, section.spool_mb << 20)
        self._pending: list[Sequence[ReadableSpan]] = []  # by finding
        self._push: Push | None = None
        self._local = 0
        self._resends = Resends()
        self._starts: OrderedDict[str, None] = OrderedDict()
        for target in targets:
            transport.load(target)  # seconds from a cold disk: not when the first finding waits

    def emit(self, records: Sequence[Record]) -> None:
        """Take *records*: spans wait for `flush`, everything else shows up in the metrics."""
        self._start()
        for record in records:
            if isinstance(record, Explained) and self._resends.knows(record):
                continue
            self._figures.add(record)
            if self._settings.traces is None:
                continue
            if isinstance(record, Status):
                self._cold_starts(record)
            elif isinstance(record, Explained):
                if self._leaves(record.finding):
                    self._pending.append(to_spans(record, self._resources.of(record.finding)))
                else:
                    self._local += 1

    def _cold_starts(self, record: Status) -> None:
        """Send the start of each engine once, when it is ready."""
        engines = record.status.get("engines")
        for start in cold_start.ready(engines if isinstance(engines, list) else []):
            if start.key not in self._starts:
                self._starts[start.key] = None
                while len(self._starts) > _REMEMBERED:
                    self._starts.popitem(last=False)
                resource = self._resources.of_service(start.service, int(start.engines[0].get("tgid") or 0))
                self._pending.append(cold_start.to_spans(start, resource, clock.offset_ns()))

    def flush(self) -> str:
        """Put the spans into the outbox. Returns "" when they are on disk or sent, else why they are not."""
        pending, self._pending = self._pending, []
        for request in encode(pending):
            if request.error:
                self._outbox.drop("traces", request.items, request.error)
            else:
                self._outbox.put("traces", request.payload, request.items)
        return self._outbox.flush()

    def status(self) -> dict[str, Any]:
        """Return what `whyspan probes` shows."""
        out: dict[str, Any] = {"problem": self._settings.problem} | self._outbox.status()
        if "traces" in out:
            out["traces"]["kept_local"] = self._local
        if "metrics" in out:
            out["metrics"]["interval_s"] = self._settings.interval_s
        return out

    def close(self) -> None:
        """Send what is queued, for less than a second; the rest stays on disk for the next start."""
        if self._push is not None:
            self._push.close()
        self.flush()
        self._outbox.close(_CLOSE_S)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._outbox.start()
        if self._settings.metrics is not None:
            self._push = Push(
                self._figures,
                self._resources.whyspan(),
                lambda payload, points: self._outbox.put("metrics", payload, points),
                self._settings.interval_s,
                self._temporality,
            )

    def _leaves(self, finding: Finding) -> bool:
        request = finding.request
        if request.outcome == "open":
            return False  # a span has an end: this request is sent when it has one
        if not request.sampled and not self._section.export_unsampled:
            return False
        return finding.slow or request.outcome in FAILED or self._section.export_ordinary
