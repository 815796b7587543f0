"""A snapshot as OpenTelemetry's own data model, which its encoders take."""

from __future__ import annotations

from typing import Final

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from whyspan import __version__
from whyspan.tally import BOUNDS_S

from whyspan_exporters.metrics.catalogue import SCHEMA_URL
from whyspan_exporters.metrics.instrument import Buckets, Exemplar, Point
from whyspan_exporters.metrics.snapshot import Family, Snapshot

_SCOPE: Final = InstrumentationScope("whyspan", __version__, SCHEMA_URL)


def metrics_data(snapshot: Snapshot, resource: Resource) -> MetricsData:
    """Return *snapshot* as the SDK has metrics."""
    metrics = [_metric(f, snapshot.unix_ns) for f in snapshot.families]
    scope = ScopeMetrics(_SCOPE, metrics, SCHEMA_URL)
    return MetricsData([ResourceMetrics(resource, [scope], SCHEMA_URL)])


def encode(snapshot: Snapshot, resource: Resource) -> tuple[bytes, int]:
    """Return *snapshot* as a serialised ``ExportMetricsServiceRequest``, and how many points it holds."""
    payload: bytes = encode_metrics(metrics_data(snapshot, resource)).SerializeToString()
    return payload, sum(len(f.points) for f in snapshot.families)


def _metric(family: Family, unix_ns: int) -> Metric:
    i = family.instrument
    temporality = AggregationTemporality.DELTA if family.delta else AggregationTemporality.CUMULATIVE
    data: Sum | Gauge | Histogram
    if i.kind == "histogram":
        points = [_histogram_point(p, family.since_unix_ns, unix_ns) for p in family.points]
        data = Histogram(points, temporality)
    else:
        since = 0 if i.kind == "gauge" else family.since_unix_ns
        numbers = [_number_point(p, since, unix_ns) for p in family.points]
        data = Gauge(numbers) if i.kind == "gauge" else Sum(numbers, temporality, i.kind == "counter")
    return Metric(i.name, i.description, i.unit, data)


def _number_point(p: Point, since_unix_ns: int, unix_ns: int) -> NumberDataPoint:
    assert not isinstance(p.value, Buckets)
    return NumberDataPoint(p.labels, since_unix_ns, unix_ns, p.value, [_exemplar(e) for e in p.exemplars])


def _histogram_point(p: Point, since_unix_ns: int, unix_ns: int) -> HistogramDataPoint:
    assert isinstance(p.value, Buckets)
    return HistogramDataPoint(
        p.labels,
        since_unix_ns,
        unix_ns,
        sum(p.value.counts),
        p.value.total,
        p.value.counts,
        BOUNDS_S,
        None,  # type: ignore[arg-type]  # least and greatest are not known; the encoder then leaves them out
        None,  # type: ignore[arg-type]
        [_exemplar(e) for e in p.exemplars],
    )


def _exemplar(e: Exemplar) -> SdkExemplar:
    return SdkExemplar({}, e.value, e.unix_ns, int(e.span_id, 16), int(e.trace_id, 16))
