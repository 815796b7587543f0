"""Metrics of the agent itself: what its probes see, lose and cost, its processes, its store, its spool."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Final

from whyspan import __version__
from whyspan.text import clean

from whyspan_exporters.metrics.figures import Figures, label, number, probes, table
from whyspan_exporters.metrics.instrument import (
    SERVICE,
    Instrument,
    Point,
    Read,
    counter,
    gauge,
    totals,
    updown,
)

_PROBE: Final = "whyspan.probe"
_STATE: Final = "whyspan.state"
_PROCESS: Final = "whyspan.process"
_QUEUE: Final = "whyspan.queue"
_SIGNAL: Final = "whyspan.signal"
_RESULT: Final = "whyspan.result"
_STATES: Final = frozenset(("attached", "partial", "waiting", "failed", "disabled", "shed"))


def of_collector(field: str) -> Read:
    """Read a number of the collector's state."""

    def read(figures: Figures) -> Iterator[Point]:
        if (value := number(figures.collector().get(field))) is not None:
            yield Point(value, {})

    return read


def _probe(field: str, scale: float = 1.0) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        for name, probe in probes(figures.collector()):
            if (value := number(probe.get(field))) is not None:
                yield Point(value * scale, {_PROBE: name})

    return read


def _probe_states(figures: Figures) -> Iterator[Point]:
    for name, probe in probes(figures.collector()):
        state = probe.get("state")
        yield Point(1, {_PROBE: name, _STATE: state if state in _STATES else "other"})


def _cpu(figures: Figures) -> Iterator[Point]:
    for _, _, value in figures.totals("cpu_s"):
        yield Point(value, {_PROCESS: "collector"})
    if (used := number(figures.exporter().get("cpu_s"))) is not None:
        yield Point(used, {_PROCESS: "exporter"})


def _memory(figures: Figures) -> Iterator[Point]:
    for process, status in (("collector", figures.collector()), ("exporter", figures.exporter())):
        if (value := number(status.get("rss_bytes"))) is not None:
            yield Point(value, {_PROCESS: process})


def _watched(figures: Figures) -> Iterator[Point]:
    for service, value in table(figures.collector(), "watched_by_service").items():
        if (n := number(value)) is not None:
            yield Point(n, {SERVICE: label(str(service))})


def _findings_dropped(figures: Figures) -> Iterator[Point]:
    for _, _, value in figures.totals("findings_dropped"):
        yield Point(value, {_QUEUE: "collector"})
    if (dropped := number(figures.sink("store").get("dropped"))) is not None:
        yield Point(dropped, {_QUEUE: "store"})


def _store_ok(figures: Figures) -> Iterator[Point]:
    if store := figures.sink("store"):
        yield Point(0 if store.get("state") else 1, {})


def _store_bytes(figures: Figures) -> Iterator[Point]:
    if (value := number(figures.sink("store").get("bytes"))) is not None:
        yield Point(value, {})


def _spans(figures: Figures) -> Iterator[Point]:
    traces = table(figures.sink("otlp"), "traces")
    for result in ("sent", "failed", "dropped"):
        if (value := number(traces.get(result))) is not None:
            yield Point(value, {_RESULT: result})


def _spans_queued(figures: Figures) -> Iterator[Point]:
    if (value := number(table(figures.sink("otlp"), "traces").get("queued"))) is not None:
        yield Point(value, {})


def _spool(field: str) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        if (value := number(table(figures.sink("otlp"), "spool").get(field))) is not None:
            yield Point(value, {})

    return read


def _lost(figures: Figures) -> Iterator[Point]:
    for signal in ("traces", "metrics"):
        if (value := number(table(figures.sink("otlp"), signal).get("dropped"))) is not None:
            yield Point(value, {_SIGNAL: signal})


def _up(figures: Figures) -> Iterator[Point]:
    yield Point(1 if figures.collector() else 0, {})


def _build(_: Figures) -> Iterator[Point]:
    yield Point(1, {"service.version": __version__, "whyspan.kernel": clean(platform.release(), 64)})


INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    gauge("whyspan.build.info", "1", "Always 1.", _build, "service.version", "whyspan.kernel"),
    gauge("whyspan.collector.up", "1", "1 while the collector reports, else 0.", _up),
    updown(
        "whyspan.finding.queued",
        "{finding}",
        "Findings that wait in the collector for the exporter.",
        of_collector("findings_pending"),
    ),
    counter(
        "whyspan.finding.dropped",
        "{finding}",
        "Findings lost at the bound of a queue.",
        _findings_dropped,
        _QUEUE,
    ),
    counter(
        "whyspan.event.count",
        "{event}",
        "Kernel events received.",
        totals("probe_events", "", _PROBE),
        _PROBE,
    ),
    counter(
        "whyspan.event.dropped",
        "{event}",
        "Kernel events that found their ring full.",
        totals("probe_drops", "", _PROBE),
        _PROBE,
    ),
    gauge("whyspan.probe.state", "1", "1 for the state that the probe is in.", _probe_states, _PROBE, _STATE),
    gauge(
        "whyspan.probe.hit_rate",
        "{hit}/s",
        "How often its programs run.",
        _probe("hits_per_s"),
        _PROBE,
        whole=False,
    ),
    gauge(
        "whyspan.probe.hit_time",
        "s",
        "Time of one run, mean.",
        _probe("ns_per_hit", 1e-9),
        _PROBE,
        whole=False,
    ),
    gauge(
        "whyspan.probe.cpu.utilization", "1", "Share of one core.", _probe("core_ratio"), _PROBE, whole=False
    ),
    counter(
        "whyspan.probe.missed",
        "{run}",
        "Runs that the kernel skipped: already running on that CPU, or a return that it did not follow.",
        totals("probe_missed", "", _PROBE),
        _PROBE,
    ),
    counter(
        "whyspan.process.cpu.time", "s", "CPU time of the agent's processes.", _cpu, _PROCESS, whole=False
    ),
    updown(
        "whyspan.process.memory.usage", "By", "Resident memory of the agent's processes.", _memory, _PROCESS
    ),
    updown("whyspan.target.count", "{process}", "Processes watched.", _watched, SERVICE),
    gauge(
        "whyspan.target.cpu.usage",
        "{cpu}",
        "CPUs that the watched processes use.",
        of_collector("target_cores"),
        whole=False,
    ),
    gauge("whyspan.store.ok", "1", "1 while the local store can be written, else 0.", _store_ok),
    updown("whyspan.store.size", "By", "Size of the local store.", _store_bytes),
    counter("whyspan.span.count", "{span}", "Spans by what became of them.", _spans, _RESULT, source="spool"),
    updown("whyspan.span.queued", "{span}", "Spans that wait to be sent.", _spans_queued),
    updown("whyspan.spool.size", "By", "Size on disk of what waits to be sent by OTLP.", _spool("bytes")),
    updown("whyspan.spool.items", "{batch}", "Batches that wait to be sent by OTLP.", _spool("batches")),
    gauge("whyspan.spool.oldest", "s", "Age of the oldest of them.", _spool("oldest_s"), whole=False),
    counter(
        "whyspan.spool.lost",
        "{span}",
        "What was lost here: the oldest at the spool's bound, what the disk gave back damaged. Points, of metrics.",
        _lost,
        _SIGNAL,
        source="spool",
    ),
)
