"""whyspan's own metrics: what it sees, loses and costs. Names are ``whyspan.*``, units are UCUM's.

Labels are services, engines, outcomes, probes and cause ids: few, and bounded where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from whyspan import __version__

from whyspan_exporters.otlp import burst_metrics, engine_metrics
from whyspan_exporters.otlp.figures import Figures, number, probes
from whyspan_exporters.otlp.instrument import SERVICE, Instrument, Point, Read, totals

_PROBE: Final = "whyspan.probe"


def _not_explained(figures: Figures) -> Iterator[Point]:
    for service, label, value in figures.totals("not_explained"):
        yield value, {SERVICE: service, "whyspan.kind": label or "slow"}


def _collector(field: str) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        if (value := number(figures.collector().get(field))) is not None:
            yield value, {}

    return read


def _probe(field: str, scale: float = 1.0) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        for name, probe in probes(figures.collector()):
            if (value := number(probe.get(field))) is not None:
                yield value * scale, {_PROBE: name}

    return read


def _probe_states(figures: Figures) -> Iterator[Point]:
    known = ("attached", "partial", "waiting", "failed", "disabled", "shed")
    for name, probe in probes(figures.collector()):
        state = probe.get("state")
        yield 1, {_PROBE: name, "whyspan.state": state if state in known else "other"}


def _cpu(figures: Figures) -> Iterator[Point]:
    for _, _, value in figures.totals("cpu_s"):
        yield value, {"whyspan.process": "collector"}
    if (value_or_none := number(figures.exporter().get("cpu_s"))) is not None:
        yield value_or_none, {"whyspan.process": "exporter"}


def _memory(figures: Figures) -> Iterator[Point]:
    for process, status in (("collector", figures.collector()), ("exporter", figures.exporter())):
        if (value := number(status.get("rss_bytes"))) is not None:
            yield value, {"whyspan.process": process}


def _watched(figures: Figures) -> Iterator[Point]:
    watched = figures.collector().get("watched_by_service")
    for service, value in watched.items() if isinstance(watched, dict) else ():
        if (n := number(value)) is not None:
            yield n, {SERVICE: str(service)}


def _findings_dropped(figures: Figures) -> Iterator[Point]:
    for _, _, value in figures.totals("findings_dropped"):
        yield value, {"whyspan.queue": "collector"}
    if (dropped := number(_sink(figures, "store").get("dropped"))) is not None:
        yield dropped, {"whyspan.queue": "store"}


def _store_ok(figures: Figures) -> Iterator[Point]:
    store = _sink(figures, "store")
    if store:
        yield (0 if store.get("state") else 1), {}


def _store_bytes(figures: Figures) -> Iterator[Point]:
    if (value := number(_sink(figures, "store").get("bytes"))) is not None:
        yield value, {}


def _sink(figures: Figures, name: str) -> dict[str, Any]:
    sinks = figures.exporter().get("sinks")
    sink = sinks.get(name) if isinstance(sinks, dict) else None
    return sink if isinstance(sink, dict) else {}


def _up(figures: Figures) -> Iterator[Point]:
    yield (1 if figures.collector() else 0), {}


_INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    Instrument("gauge", "whyspan.collector.up", "1", "1 while the collector reports, else 0.", _up),
    Instrument(
        "counter",
        "whyspan.request.count",
        "{request}",
        "Requests that ended on the watched servers.",
        totals("requests", SERVICE, "whyspan.outcome"),
    ),
    Instrument(
        "updown", "whyspan.request.open", "{request}", "Requests in progress.", _collector("open_requests")
    ),
    Instrument(
        "counter",
        "whyspan.request.not_explained",
        "{request}",
        "Slow or failed requests over the limit of explanations per second.",
        _not_explained,
    ),
    Instrument(
        "counter",
        "whyspan.finding.count",
        "{finding}",
        "Requests explained, by cause; none: it was not slow.",
        totals("findings", SERVICE, "whyspan.cause"),
    ),
    Instrument(
        "updown",
        "whyspan.finding.queued",
        "{finding}",
        "Findings that wait in the collector for the exporter.",
        _collector("findings_pending"),
    ),
    Instrument(
        "counter",
        "whyspan.finding.dropped",
        "{finding}",
        "Findings lost at the bound of a queue.",
        _findings_dropped,
    ),
    Instrument(
        "counter",
        "whyspan.event.count",
        "{event}",
        "Kernel events received.",
        totals("probe_events", "", _PROBE),
    ),
    Instrument(
        "counter",
        "whyspan.event.dropped",
        "{event}",
        "Kernel events that found their ring full.",
        totals("probe_drops", "", _PROBE),
    ),
    Instrument("gauge", "whyspan.probe.state", "1", "1 for the state that the probe is in.", _probe_states),
    Instrument(
        "gauge",
        "whyspan.probe.hit_rate",
        "{hit}/s",
        "How often its programs run.",
        _probe("hits_per_s"),
        False,
    ),
    Instrument(
        "gauge", "whyspan.probe.hit_time", "s", "Time of one run, mean.", _probe("ns_per_hit", 1e-9), False
    ),
    Instrument(
        "gauge", "whyspan.probe.cpu.utilization", "1", "Share of one core.", _probe("core_ratio"), False
    ),
    Instrument(
        "counter",
        "whyspan.probe.missed",
        "{run}",
        "Runs that the kernel skipped since the program was already running on that CPU.",
        totals("probe_missed", "", _PROBE),
    ),
    Instrument("counter", "whyspan.process.cpu.time", "s", "CPU time of the agent's processes.", _cpu, False),
    Instrument(
        "updown", "whyspan.process.memory.usage", "By", "Resident memory of the agent's processes.", _memory
    ),
    Instrument("updown", "whyspan.target.count", "{process}", "Processes watched.", _watched),
    Instrument(
        "gauge",
        "whyspan.target.cpu.usage",
        "{cpu}",
        "CPUs that the watched processes use.",
        _collector("target_cores"),
        False,
    ),
    Instrument(
        "gauge", "whyspan.store.ok", "1", "1 while the local store can be written, else 0.", _store_ok
    ),
    Instrument("updown", "whyspan.store.size", "By", "Size of the local store.", _store_bytes),
)


class SpanFigures(NamedTuple):
    """Where to read the sender's own figures."""

    counts: Callable[[], dict[str, int]]
    queued: Callable[[], int]


def start(
    reader: MetricReader, resource: Resource, figures: Figures, spans: SpanFigures | None
) -> MeterProvider:
    """Return a provider that reports *figures*, and *spans* when traces are on, through *reader*.

    The caller shuts it down.
    """
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    meter = provider.get_meter("whyspan", __version__)
    instruments = _INSTRUMENTS + engine_metrics.INSTRUMENTS + burst_metrics.INSTRUMENTS
    if spans is not None:
        instruments += _span_instruments(spans)
    for instrument in instruments:
        _create(meter, instrument, figures)
    return provider


def _span_instruments(spans: SpanFigures) -> tuple[Instrument, ...]:
    def by_result(_: Figures) -> Iterator[Point]:
        for result, value in spans.counts().items():
            yield value, {"whyspan.result": result}

    def queued(_: Figures) -> Iterator[Point]:
        yield spans.queued(), {}

    return (
        Instrument("counter", "whyspan.span.count", "{span}", "Spans by what became of them.", by_result),
        Instrument("updown", "whyspan.span.queued", "{span}", "Spans that wait to be sent.", queued),
    )


def _create(meter: Meter, instrument: Instrument, figures: Figures) -> None:
    def observe(_: CallbackOptions) -> Iterator[Observation]:
        # Of two observations with the same labels the SDK would keep one.
        sums: dict[tuple[tuple[str, str], ...], float] = {}
        for value, labels in instrument.read(figures):
            key = tuple(labels.items())
            sums[key] = sums.get(key, 0) + value
        for key, value in sums.items():
            yield Observation(int(value) if instrument.whole else value, dict(key))

    make = {
        "counter": meter.create_observable_counter,
        "updown": meter.create_observable_up_down_counter,
        "gauge": meter.create_observable_gauge,
    }[instrument.kind]
    make(instrument.name, [observe], instrument.unit, instrument.description)
