"""A snapshot as OTLP: kinds, start times, exemplars once, cumulative and delta."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.sdk.resources import Resource
from whyspan import clock
from whyspan.config import Objectives
from whyspan.model import Finding
from whyspan.tally import BOUNDS_S, Tally
from whyspan_exporters.link import Count
from whyspan_exporters.metrics import otlp, temporality
from whyspan_exporters.metrics.catalogue import METRICS, NOT_FILLED, SCHEMA_URL
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.push import Push
from whyspan_exporters.metrics.snapshot import Fresh, Snapshot, take
from whyspan_exporters.metrics.temporality import DELTAS, Deltas
from whyspan_exporters.records import EXPORTER, Counts, Explained, Status, finding_id

from tests.unit.metrics.full import full_figures
from tests.unit.receivers import values

MakeFinding = Callable[..., Finding]
RESOURCE = Resource({"service.name": "whyspan"})
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def decoded(snapshot: Snapshot) -> dict[str, Metric]:
    payload, items = otlp.encode(snapshot, RESOURCE)
    (resource,) = ExportMetricsServiceRequest.FromString(payload).resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.schema_url == SCHEMA_URL
    found = {m.name: m for m in scope.metrics}
    assert items == sum(len(points(m)) for m in found.values())
    return found


def points(metric: Metric) -> Any:
    return getattr(metric, str(metric.WhichOneof("data"))).data_points


def number(metric: Metric) -> float:
    (p,) = points(metric)
    return float(getattr(p, str(p.WhichOneof("value"))))


def test_every_metric_that_is_filled_is_encoded_by_its_kind(make_finding: MakeFinding) -> None:
    figures = full_figures(make_finding)
    now = clock.now_unix_ns()
    found = decoded(take(figures, now))
    assert set(found) == {i.name for i in METRICS} - set(NOT_FILLED)
    for i in METRICS:
        if i.name in NOT_FILLED:
            continue
        m = found[i.name]
        assert (m.unit, m.description) == (i.unit, i.description)
        assert m.WhichOneof("data") == {"updown": "sum", "counter": "sum"}.get(i.kind, i.kind)
        if i.kind in ("updown", "counter"):
            assert (m.sum.is_monotonic, m.sum.aggregation_temporality) == (i.kind == "counter", CUMULATIVE)
        for p in points(m):
            assert p.time_unix_nano == now
            assert set(values(p.attributes)) <= set(i.attributes)
            if i.kind != "histogram":
                assert p.WhichOneof("value") == ("as_int" if i.whole else "as_double"), i.name
    assert {"whyspan.cause.excess.time", "whyspan.cause.culprit.time"} <= {
        name for name, m in found.items() if any(p.exemplars for p in points(m))
    }


def test_a_histogram_has_buckets_sum_and_exemplars(make_finding: MakeFinding) -> None:
    found = decoded(take(full_figures(make_finding), 1))
    m = found["gen_ai.server.request.duration"]
    assert m.histogram.aggregation_temporality == CUMULATIVE
    (p,) = [p for p in points(m) if "error.type" not in values(p.attributes)]
    assert tuple(p.explicit_bounds) == BOUNDS_S
    assert (p.count, sum(p.bucket_counts), len(p.bucket_counts)) == (3, 3, len(BOUNDS_S) + 1)
    assert p.sum == pytest.approx(0.3)
    assert not p.HasField("min")
    assert not p.HasField("max")
    (e,) = p.exemplars
    assert e.as_double == pytest.approx(0.1)
    assert e.trace_id.hex() == f"{1:032x}"
    assert len(e.span_id) == 8
    assert p.bucket_counts[next(n for n, b in enumerate(BOUNDS_S) if e.as_double <= b)] == 3


def test_counts_start_when_the_collector_did_and_findings_with_the_exporter() -> None:
    figures = Figures()
    figures.add(Counts("i", [Count("request_codes", "chat", "ok/200", 5)]))
    figures.add(Status("i", {"uptime_s": 3600.0, "cpu_s": 1.0}))
    figures.add(Status(EXPORTER, {"cpu_s": 1.0}))
    found = decoded(take(figures, clock.now_unix_ns()))
    (p,) = points(found["whyspan.request.count"])
    assert figures.started_unix_ns - p.start_time_unix_nano == pytest.approx(3600e9, abs=60e9)
    figures.add(Status("next", {"uptime_s": 1.0}))  # another collector: its counts are added on
    (p2,) = points(decoded(take(figures, clock.now_unix_ns()))["whyspan.request.count"])
    assert p2.start_time_unix_nano == p.start_time_unix_nano


def test_by_otlp_an_exemplar_goes_out_once(make_finding: MakeFinding) -> None:
    figures, fresh = full_figures(make_finding), Fresh()

    def exemplars() -> set[str]:
        taken = take(figures, 1)
        m = decoded(fresh.of(taken, taken))["whyspan.cause.excess.time"]
        return {e.trace_id.hex() for p in points(m) for e in p.exemplars}

    first = exemplars()
    assert first
    assert exemplars() == set()
    f = make_finding(77)
    figures.add(Explained(finding_id("i", f), 1, f))
    assert exemplars() == {f"{77:032x}"}


def test_an_exemplar_waits_for_the_series_to_go_out(make_finding: MakeFinding) -> None:
    figures, tally, fresh = Figures(), Tally(), Fresh()
    deltas = Deltas(DELTAS["delta"], figures.started_unix_ns)

    def exemplars() -> list[str]:
        taken = take(figures, clock.now_unix_ns())
        m = decoded(fresh.of(deltas.of(taken), taken)).get("gen_ai.server.request.duration")
        return [e.trace_id.hex() for p in points(m) for e in p.exemplars] if m is not None else []

    f = make_finding(1)
    for finding in (f, make_finding(2)):
        tally.add(finding.request, Objectives(), "")
        figures.add(Status("i", tally.state(0) | {"uptime_s": 0.0}))
        if finding is f:
            assert exemplars() == []
            figures.add(Explained(finding_id("i", f), 1, f))
            assert exemplars() == []  # nothing was counted since
        else:
            assert exemplars() == [f"{1:032x}"]
    assert exemplars() == []


def count(figures: Figures, requests: int, *, instance: str = "i", up_s: float = 0.0) -> None:
    figures.add(Counts(instance, [Count("request_codes", "chat", "ok/200", requests)]))
    figures.add(Status(instance, {"uptime_s": up_s, "open_requests": requests, "cpu_s": float(requests)}))


def test_deltas_add_up_to_the_sums() -> None:
    figures = Figures()
    deltas = Deltas(DELTAS["delta"], figures.started_unix_ns)
    total, last_end = 0.0, 0
    for now, requests in enumerate((7, 7, 12, 13, 13, 40), start=1):
        count(figures, requests)
        at = clock.now_unix_ns() + now
        found = decoded(deltas.of(take(figures, at)))
        if (m := found.get("whyspan.request.count")) is not None:
            assert m.sum.aggregation_temporality == DELTA
            (p,) = points(m)
            assert last_end <= p.start_time_unix_nano < p.time_unix_nano == at
            total += p.as_int
        last_end = at
        assert found["whyspan.request.open"].sum.aggregation_temporality == CUMULATIVE
        assert number(found["whyspan.request.open"]) == requests
        assert total == requests


def test_deltas_go_on_when_the_collector_restarts() -> None:
    figures = Figures()
    deltas = Deltas(DELTAS["delta"], figures.started_unix_ns)
    seen = 0.0
    for instance, requests in (("a", 10), ("a", 15), ("b", 2), ("b", 9)):
        count(figures, requests, instance=instance)
        seen += number(decoded(deltas.of(take(figures, clock.now_unix_ns())))["whyspan.request.count"])
    assert seen == 15 + 9


def test_what_an_exporter_before_has_sent_is_no_delta() -> None:
    figures = Figures()
    deltas = Deltas(DELTAS["delta"], figures.started_unix_ns)
    count(figures, 1000, up_s=3600.0)
    assert "whyspan.request.count" not in decoded(deltas.of(take(figures, clock.now_unix_ns())))
    count(figures, 1003, up_s=3660.0)
    assert number(decoded(deltas.of(take(figures, clock.now_unix_ns())))["whyspan.request.count"]) == 3


def test_histograms_as_deltas(make_finding: MakeFinding) -> None:
    figures, tally = Figures(), Tally()
    deltas = Deltas(DELTAS["lowmemory"], figures.started_unix_ns)
    got = []
    for n in (3, 0, 4):
        for _ in range(n):
            tally.add(make_finding(1).request, Objectives(), "")
        figures.add(Status("i", tally.state(0) | {"uptime_s": 0.0}))
        count(figures, n)
        found = decoded(deltas.of(take(figures, clock.now_unix_ns())))
        assert found["whyspan.request.count"].sum.aggregation_temporality == CUMULATIVE
        if (m := found.get("gen_ai.server.request.duration")) is not None:
            (p,) = points(m)
            assert m.histogram.aggregation_temporality == DELTA
            assert p.count == sum(p.bucket_counts)
            got.append((p.count, round(p.sum, 6)))
    assert got == [(3, 0.3), (4, 0.4)]


@pytest.mark.parametrize(
    ("configured", "env", "expected", "problem"),
    [
        ("", "", "cumulative", False),
        ("delta", "cumulative", "delta", False),
        ("", " Delta ", "delta", False),
        ("", "LOWMEMORY", "lowmemory", False),
        ("", "sometimes", "cumulative", True),
    ],
)
def test_preference(configured: str, env: str, expected: str, problem: bool) -> None:
    found, why = temporality.preference(configured, {temporality.ENV: env})
    assert (found, bool(why)) == (expected, problem)


def test_snapshots_go_out_every_so_often_and_at_the_end(make_finding: MakeFinding) -> None:
    got: list[tuple[bytes, int]] = []
    twice = threading.Event()

    def put(payload: bytes, items: int) -> None:
        got.append((payload, items))
        if len(got) == 1:
            raise OSError("not this time")
        if len(got) == 3:
            twice.set()

    push = Push(full_figures(make_finding), RESOURCE, put, 0.01)
    assert twice.wait(20)
    push.close()
    last = len(got)
    assert all(items > 60 for _, items in got)
    assert ExportMetricsServiceRequest.FromString(got[-1][0])
    late = Push(full_figures(make_finding), RESOURCE, put, 3600)
    late.close()
    assert len(got) == last + 1


def test_a_payload_at_all_bounds_is_small_enough_for_a_receiver(make_finding: MakeFinding) -> None:
    """gRPC takes 4 MiB unless told otherwise, and so does the outbox."""
    figures = Figures()
    zeros = [0] * len(BOUNDS_S)
    long = "x" * 64
    rows = [[f"{n}{long}", long, long, False, [[1, *zeros]] * 3, [0.001] * 3] for n in range(64)]
    figures.add(Status("i", {"latencies": rows}))
    figures.add(Counts("i", [Count("request_codes", f"{n}{long}", f"ok/{long}", 1) for n in range(5000)]))
    for n in range(1100):
        f = make_finding(n, service=f"s{n % 20}", cause=f"c{n}.{long}")
        figures.add(Explained(finding_id("i", f), 1, f))
    payload, _ = otlp.encode(take(figures, 1), RESOURCE)
    assert 500_000 < len(payload) < 4 << 20
