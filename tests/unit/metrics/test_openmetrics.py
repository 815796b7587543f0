"""The text for Prometheus: it parses, says what OTLP says, and carries exemplars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource
from prometheus_client import parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from whyspan.model import Finding
from whyspan.tally import BOUNDS_S
from whyspan_exporters.link import Count
from whyspan_exporters.metrics import otlp
from whyspan_exporters.metrics.catalogue import METRICS, NOT_FILLED, by_series
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.naming import label_name
from whyspan_exporters.metrics.openmetrics import render
from whyspan_exporters.metrics.snapshot import Snapshot, take
from whyspan_exporters.records import Counts, Status

from tests.unit.metrics.full import full_figures
from tests.unit.receivers import values

MakeFinding = Callable[..., Finding]
PARSE: Any = text_string_to_metric_families  # which has no types
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
RESOURCE = {"service.name": "whyspan", "host.name": 'a "host"\n'}


def families(snapshot: Snapshot, accept: str = OPENMETRICS) -> dict[str, Metric]:
    text, content_type = render(snapshot, RESOURCE, accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    return {m.name: m for m in PARSE(text.decode())}


def series(found: dict[str, Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], Sample]:
    out = {}
    for m in found.values():
        for s in m.samples:
            key = s.name, frozenset(s.labels.items())
            assert key not in out
            out[key] = s
    return out


def test_every_metric_that_is_filled_is_there_and_nothing_else(make_finding: MakeFinding) -> None:
    found = series(families(take(full_figures(make_finding), 1)))
    names = {name for name, _ in found}
    expected = {name for name, i in by_series().items() if i.name not in NOT_FILLED}
    assert names == expected | {"target_info"}
    for (name, labels), _ in found.items():
        if name != "target_info":
            allowed = {label_name(a) for a in by_series()[name].attributes} | {"le"}
            assert {k for k, _ in labels} <= allowed


def test_it_says_what_otlp_says(make_finding: MakeFinding) -> None:
    snapshot = take(full_figures(make_finding), 1)
    found = series(families(snapshot))
    request = encode_metrics(otlp.metrics_data(snapshot, Resource({})))
    by_name = {i.name: i for i in METRICS}
    compared = 0
    for m in request.resource_metrics[0].scope_metrics[0].metrics:
        i = by_name[m.name]
        for p in getattr(m, str(m.WhichOneof("data"))).data_points:
            labels = {label_name(k): str(v) for k, v in values(p.attributes).items()}
            key = frozenset(labels.items())
            if i.kind != "histogram":
                assert found[i.prometheus, key].value == pytest.approx(getattr(p, str(p.WhichOneof("value"))))
            else:
                assert found[f"{i.prometheus}_count", key].value == p.count
                assert found[f"{i.prometheus}_sum", key].value == pytest.approx(p.sum)
                up_to = 0
                for bound, count in zip((*BOUNDS_S, float("inf")), p.bucket_counts, strict=True):
                    up_to += count
                    le = "+Inf" if bound == float("inf") else str(float(bound))
                    assert found[f"{i.prometheus}_bucket", key | {("le", le)}].value == up_to
            compared += 1
    assert compared > 60


def test_kinds_units_and_target(make_finding: MakeFinding) -> None:
    found = families(take(full_figures(make_finding), 1))
    shapes = {
        name: (found[name].type, found[name].unit)
        for name in (
            "gen_ai_server_request_duration_seconds",
            "whyspan_cause_excess_time_seconds",
            "whyspan_store_size_bytes",
            "whyspan_build_info_ratio",
        )
    }
    assert shapes == {
        "gen_ai_server_request_duration_seconds": ("histogram", "seconds"),
        "whyspan_cause_excess_time_seconds": ("counter", "seconds"),
        "whyspan_store_size_bytes": ("gauge", "bytes"),
        "whyspan_build_info_ratio": ("gauge", ""),
    }
    (target,) = found["target"].samples
    assert (target.name, target.labels) == (
        "target_info",
        {"service_name": "whyspan", "host_name": 'a "host"\n'},
    )


def test_exemplars_carry_the_trace(make_finding: MakeFinding) -> None:
    found = series(families(take(full_figures(make_finding), 1)))
    with_exemplars = {name: s for (name, _), s in found.items() if s.exemplar is not None}
    assert set(with_exemplars) == {
        "gen_ai_server_request_duration_seconds_bucket",
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_time_per_output_token_seconds_bucket",
        "whyspan_cause_excess_time_seconds_total",
        "whyspan_cause_culprit_time_seconds_total",
    }
    for s in with_exemplars.values():
        assert s.exemplar is not None
        assert s.exemplar.labels["trace_id"] in {f"{n:032x}" for n in (1, 3)}
        assert len(s.exemplar.labels["span_id"]) == 16
        assert s.exemplar.timestamp is not None
        if "le" in s.labels:
            assert s.exemplar.value <= float(s.labels["le"])


def test_the_older_format_has_the_same_series(make_finding: MakeFinding) -> None:
    snapshot = take(full_figures(make_finding), 1)
    text, content_type = render(snapshot, RESOURCE, "text/plain;version=0.0.4")
    assert content_type.startswith("text/plain; version=0.0.4")
    old = {s.name for m in parser.text_string_to_metric_families(text.decode()) for s in m.samples}
    assert old == {name for name, _ in series(families(snapshot))}
    assert b"trace_id" not in text


HOSTILE = 'a"b\\c\nd{e}=,# EOF\x1b[31m\u202e' + "x" * 300


def test_whatever_a_name_is_it_stays_one_label() -> None:
    figures = Figures()
    figures.add(Counts("i", [Count("request_codes", HOSTILE, "ok/200", 7)]))
    figures.add(Status("i", {"inter_token": {HOSTILE: {"jitter": 0.5}}, "cpu_limits": {HOSTILE: 2}}))
    found = series(families(take(figures, 1)))
    services = {s.labels["whyspan_service"] for s in found.values() if "whyspan_service" in s.labels}
    assert len(services) == 1
    (service,) = services
    assert service.startswith('a"b\\c\\x0ad{e}=,# EOF\\x1b[31m\\u202e')
    assert len(service) == 64


def test_the_overflow_is_a_series_of_its_own() -> None:
    figures = Figures()
    figures.add(Counts("i", [Count("request_codes", "", "other", 7)]))
    found = series(families(take(figures, 1)))
    assert found["whyspan_request_count_total", frozenset({("otel_metric_overflow", "true")})].value == 7
