"""The OTLP sink: chooses what leaves the host, and keeps sender and metrics running."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from whyspan import clock
from whyspan.config import Otlp
from whyspan.model import FAILED, Finding

from whyspan_exporters.otlp import cold_start, metrics, sdk
from whyspan_exporters.otlp.delivery import Delivery, Reasons, reasons
from whyspan_exporters.otlp.figures import Figures
from whyspan_exporters.otlp.resource import Resources
from whyspan_exporters.otlp.sender import Sender
from whyspan_exporters.otlp.settings import Settings, Target
from whyspan_exporters.otlp.spans import to_spans
from whyspan_exporters.records import Explained, Record, Status

log = logging.getLogger("whyspan.otlp")

# Together below the 5 s that the supervisor gives: the rest of the exporter has to end too.
_CLOSE_SPANS_S: Final = 1.0
_CLOSE_METRICS_S: Final = 0.5
# More than a collector can have on its way unacknowledged, and so send again.
_REMEMBERED: Final = 4096


class OtlpSink:
    """Never blocks the exporter's loop, and never keeps a finding from being acknowledged.

    What the collector does not take is lost for it, and counted; the local store has it.
    """

    def __init__(self, settings: Settings, section: Otlp) -> None:
        """Remember *settings*. Threads start at the first `emit`: capabilities are dropped by then, per thread."""
        self._settings, self._section = settings, section
        self._started = False
        self._resources = Resources()
        self._figures = Figures()
        self._traces = Delivery(settings.traces) if settings.traces else None
        self._metrics = Delivery(settings.metrics) if settings.metrics else None
        self._sender: Sender | None = None
        self._provider: MeterProvider | None = None
        self._local = 0
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._starts: OrderedDict[str, None] = OrderedDict()
        for target in (settings.traces, settings.metrics):
            if target:
                sdk.load(target)  # seconds from a cold disk: not when the first finding waits

    def emit(self, records: Sequence[Record]) -> None:
        """Take *records*: spans are queued, everything else shows up in the metrics."""
        self._start()
        for record in records:
            if isinstance(record, Explained) and self._is_known(record):
                continue
            self._figures.add(record)
            if isinstance(record, Status) and self._sender is not None:
                self._cold_starts(record, self._sender)
            if isinstance(record, Explained) and self._sender is not None:
                if self._leaves(record.finding):
                    self._sender.offer(to_spans(record, self._resources.of(record.finding)))
                else:
                    self._local += 1

    def _cold_starts(self, record: Status, sender: Sender) -> None:
        """Send the start of each engine once, when it is ready."""
        engines = record.status.get("engines")
        for start in cold_start.ready(engines if isinstance(engines, list) else []):
            if start.key not in self._starts:
                self._starts[start.key] = None
                while len(self._starts) > _REMEMBERED:
                    self._starts.popitem(last=False)
                resource = self._resources.of_service(start.service, int(start.engines[0].get("tgid") or 0))
                sender.offer(cold_start.to_spans(start, resource, clock.offset_ns()))

    def flush(self) -> str:
        """Return "": a finding is durable when the store has it, and waits for nobody else."""
        return ""

    def status(self) -> dict[str, Any]:
        """Return what `whyspan probes` shows."""
        out: dict[str, Any] = {"problem": self._settings.problem}
        if self._traces is not None:
            queued = self._sender.queued() if self._sender else 0
            out["traces"] = self._traces.status() | {"queued": queued, "kept_local": self._local}
        if self._metrics is not None:
            out["metrics"] = self._metrics.status() | {"interval_s": self._settings.interval_s}
        return out

    def close(self) -> None:
        """Send what is queued, for a few seconds at most."""
        for delivery in (self._traces, self._metrics):
            if delivery is not None:
                delivery.close()
        if self._sender is not None:
            self._sender.close(_CLOSE_SPANS_S)
        if self._provider is not None:
            self._provider.shutdown(_CLOSE_METRICS_S * 1000)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        why = reasons()
        for target in (self._settings.traces, self._settings.metrics):
            if target:
                log.info("otlp: %s go to %s by %s", target.signal, target.shown, target.protocol)
        if (spans := self._traces) is not None:
            self._sender = Sender(lambda: sdk.span_exporter(spans.target, why.note), spans, why)
        if self._metrics is not None:
            try:
                self._provider = self._start_metrics(self._metrics.target, self._metrics, why)
            except Exception as exc:
                # The SDK could not make an exporter of this environment; the state says why.
                self._metrics.failed(0, f"{type(exc).__name__}: {exc}")

    def _start_metrics(self, target: Target, delivery: Delivery, why: Reasons) -> MeterProvider:
        def on_result(ok: bool) -> None:
            reason = why.take()
            if ok:
                delivery.sent(1)
            else:
                delivery.failed(1, reason)

        exporter = sdk.metric_exporter(target, why.note, on_result)
        reader = PeriodicExportingMetricReader(exporter, self._settings.interval_s * 1000)
        spans = None
        if self._traces is not None and self._sender is not None:
            spans = metrics.SpanFigures(self._traces.counts, self._sender.queued)
        return metrics.start(reader, self._resources.whyspan(), self._figures, spans)

    def _is_known(self, record: Explained) -> bool:
        """Whether this very finding came before: a collector that reconnects sends again what was not acknowledged."""
        end_ns = record.finding.request.end_ns
        known = self._seen.get(record.id) == end_ns
        self._seen[record.id] = end_ns
        self._seen.move_to_end(record.id)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return known

    def _leaves(self, finding: Finding) -> bool:
        request = finding.request
        if request.outcome == "open":
            return False  # a span has an end: this request is sent when it has one
        if not request.sampled and not self._section.export_unsampled:
            return False
        return finding.slow or request.outcome in FAILED or self._section.export_ordinary
