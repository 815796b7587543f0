"""What metrics there are, what they are called, and that the documentation says the same."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    hw_attributes,
    service_attributes,
)
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics, hw_metrics
from opentelemetry.semconv.schemas import Schemas
from whyspan_exporters.metrics import docs
from whyspan_exporters.metrics.attributes import ATTRIBUTES
from whyspan_exporters.metrics.catalogue import METRICS, NOT_FILLED, SCHEMA_URL, SEMCONV, by_name, by_series
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.instrument import OVERFLOW
from whyspan_exporters.metrics.naming import UNITS, label_name, metric_name

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def constants(*modules: object) -> dict[str, str]:
    """Names of conventions, and the module that has them."""
    return {
        v: str(m)
        for m in modules
        for k, v in vars(m).items()
        if k.isupper() and isinstance(v, str) and "." in v
    }


def test_names_and_units_are_as_they_should_be() -> None:
    assert len(by_name()) == len(METRICS)
    for i in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", i.name), i.name
        assert i.kind in ("counter", "updown", "gauge", "histogram")
        assert i.description.endswith(".")
        assert all(part in UNITS or re.fullmatch(r"\{[a-z]+\}", part) for part in i.unit.split("/")), i.unit
        assert not [a for a in i.attributes if a not in ATTRIBUTES]
    used = {a for i in METRICS for a in i.attributes} | {OVERFLOW}
    assert used == set(ATTRIBUTES)


def test_no_two_series_have_one_name_in_prometheus() -> None:
    series = [
        i.prometheus + s
        for i in METRICS
        for s in (("_bucket", "_sum", "_count") if i.kind == "histogram" else ("",))
    ]
    assert len(set(series)) == len(series) == len(by_series())
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in series)


def test_whatever_is_not_ours_is_of_the_pinned_conventions() -> None:
    assert version("opentelemetry-semantic-conventions") == SEMCONV
    assert list(Schemas)[-1].value == SCHEMA_URL
    metrics = constants(gen_ai_metrics, hw_metrics)
    assert [i.name for i in METRICS if not i.name.startswith("whyspan.") and i.name not in metrics] == []
    attributes = constants(
        error_attributes, gen_ai_attributes, hw_attributes, http_attributes, service_attributes
    )
    # The overflow's attribute is the specification's own, not a convention's.
    assert [a for a in ATTRIBUTES if not a.startswith("whyspan.") and a not in attributes] == [
        # Of hw.gpu.utilization, in the conventions since 1.27, not among the constants of this package.
        *([] if "hw.gpu.task" in attributes else ["hw.gpu.task"]),
        OVERFLOW,
    ]


@pytest.mark.parametrize(
    "i", [i for i in METRICS if not i.name.startswith("whyspan.")], ids=lambda i: str(i.name)
)
def test_kind_and_unit_are_the_conventions(i: object) -> None:
    """The package's own factories say both; a meter that only listens takes them down."""
    from whyspan_exporters.metrics.instrument import Instrument

    assert isinstance(i, Instrument)
    said: list[tuple[str, str, str]] = []

    class Meter:
        def __getattr__(self, make: str) -> object:
            return lambda name, unit="", description="", **_: said.append((make, name, unit))

        def create_observable_gauge(self, name: str, callbacks: object, unit: str, description: str) -> None:
            said.append(("create_gauge", name, unit))

    module = gen_ai_metrics if i.name.startswith("gen_ai.") else hw_metrics
    make = getattr(module, f"create_{i.name.replace('.', '_')}")
    make(Meter(), *([None] if "callbacks" in make.__code__.co_varnames else []))
    kinds = {"gauge": "create_gauge", "updown": "create_up_down_counter", "histogram": "create_histogram"}
    assert said == [(kinds[i.kind], i.name, i.unit)]


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        # From the examples of prometheus/otlptranslator, and its rules one by one.
        ("http.server.duration", "s", "histogram", "http_server_duration_seconds"),
        ("requests.count", "1", "counter", "requests_count_total"),
        ("memory.usage", "By", "updown", "memory_usage_bytes"),
        ("a.b", "1", "gauge", "a_b_ratio"),
        ("a.b", "1", "updown", "a_b"),
        ("a.total.b", "{x}", "counter", "a_b_total"),
        ("a.ratio.b", "1", "gauge", "a_b_ratio"),
        ("a.seconds.b", "s", "counter", "a_seconds_b_total"),
        ("a__b.c", "", "gauge", "a_b_c"),
        ("probe.rate", "{hit}/s", "gauge", "probe_rate_per_second"),
        ("disk.io", "By/s", "gauge", "disk_io_bytes_per_second"),
    ],
)
def test_names_are_translated_as_prometheus_does(name: str, unit: str, kind: str, expected: str) -> None:
    assert metric_name(name, unit, kind) == expected


def test_labels() -> None:
    assert label_name("gen_ai.request.model") == "gen_ai_request_model"


def test_what_is_not_filled_says_so_and_nothing_else_is_exempt() -> None:
    assert set(NOT_FILLED) == {
        "hw.gpu.utilization",
        "hw.gpu.memory.utilization",
        "hw.gpu.memory.usage",
        "hw.gpu.memory.limit",
        "whyspan.gpu.fragmentation",
    }
    assert not [p for i in METRICS if i.only for p in i.read(Figures())]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == docs.table(), "python -m whyspan_exporters.metrics.docs > docs/metrics.md"
