"""A snapshot as text for Prometheus: OpenMetrics with exemplars, or the older format, by prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from prometheus_client.core import Exemplar as PromExemplar
from prometheus_client.core import InfoMetricFamily
from prometheus_client.core import Metric as PromMetric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.exposition import generate_latest as plain
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from whyspan.tally import BOUNDS_S, bucket

from whyspan_exporters.metrics.instrument import Buckets, Exemplar, Instrument, Labels, Point
from whyspan_exporters.metrics.naming import label_name, unit_suffixes
from whyspan_exporters.metrics.snapshot import Family, Snapshot

_TYPES: Final = {"counter": "counter", "updown": "gauge", "gauge": "gauge", "histogram": "histogram"}
_BOUNDS: Final = (*(f"{b:g}" if b != int(b) else f"{b:.1f}" for b in BOUNDS_S), "+Inf")


class _Once:
    """What prometheus_client takes for a registry."""

    def __init__(self, families: Iterable[PromMetric]) -> None:
        self.collect = lambda: families


def render(snapshot: Snapshot, resource: Mapping[str, object], accept: str) -> tuple[bytes, str]:
    """Return the text and its content type.

    Args:
        snapshot: Cumulative.
        resource: Attributes that become the labels of ``target_info``.
        accept: The request's header of that name; OpenMetrics, with exemplars, where it is named.
    """
    target = InfoMetricFamily("target", "Who reports.", {label_name(k): str(v) for k, v in resource.items()})
    families = [cast(PromMetric, target), *(_family(f) for f in snapshot.families)]
    once = cast(Any, _Once(families))
    # Our names need no escaping, and its way of making sure walks through every character of every line.
    if "application/openmetrics-text" in accept:
        return cast(Any, openmetrics)(once, escaping=ALLOWUTF8, version="1.0.0"), CONTENT_TYPE_LATEST
    return plain(once, escaping=ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


def _family(family: Family) -> PromMetric:
    i = family.instrument
    name = i.prometheus.removesuffix("_total") if i.kind == "counter" else i.prometheus
    metric = PromMetric(name, i.description, _TYPES[i.kind], _unit(i, name))
    for p in family.points:
        if isinstance(p.value, Buckets):
            _add_histogram(metric, p, p.value)
        else:
            labels = _labels(p.labels)
            # Before OpenMetrics there were no exemplars of gauges, and ours are of counters only.
            exemplar = _exemplar(p.exemplars[-1]) if p.exemplars else None
            metric.add_sample(i.prometheus, labels, p.value, exemplar=exemplar)
    return metric


def _add_histogram(metric: PromMetric, p: Point, buckets: Buckets) -> None:
    labels = _labels(p.labels)
    up_to = 0
    by_bucket = {bucket(e.value): _exemplar(e) for e in p.exemplars}
    for n, count in enumerate(buckets.counts):
        up_to += count
        metric.add_sample(
            f"{metric.name}_bucket", labels | {"le": _BOUNDS[n]}, up_to, exemplar=by_bucket.get(n)
        )
    metric.add_sample(f"{metric.name}_count", labels, up_to)
    metric.add_sample(f"{metric.name}_sum", labels, buckets.total)


def _unit(i: Instrument, name: str) -> str:
    """The unit, where the name ends with it, as the format wants it."""
    unit = "_".join(unit_suffixes(i.unit))
    return unit if unit and name.endswith(f"_{unit}") else ""


def _labels(labels: Labels) -> dict[str, str]:
    return {label_name(k): str(v).lower() if isinstance(v, bool) else v for k, v in labels.items()}


def _exemplar(e: Exemplar) -> PromExemplar:
    return PromExemplar({"trace_id": e.trace_id, "span_id": e.span_id}, e.value, e.unix_ns / 1e9)
