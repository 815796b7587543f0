"""Every metric there is. `whyspan_exporters.metrics.docs` makes its table of docs/metrics.md."""

from __future__ import annotations

from typing import Final

from whyspan_exporters.metrics import agent, bursts, engines, findings, host, requests
from whyspan_exporters.metrics.instrument import Instrument

#: By what they tell of, in the order of the documentation.
GROUPS: Final[dict[str, tuple[Instrument, ...]]] = {
    "Requests": requests.INSTRUMENTS,
    "Causes": findings.INSTRUMENTS,
    "Engines": engines.INSTRUMENTS,
    "Host and GPUs": host.INSTRUMENTS,
    "Bursts": bursts.INSTRUMENTS,
    "The agent itself": agent.INSTRUMENTS,
}
METRICS: Final[tuple[Instrument, ...]] = tuple(i for group in GROUPS.values() for i in group)
#: Those that nothing fills yet, by name, and why.
NOT_FILLED: Final[dict[str, str]] = {i.name: i.only for i in METRICS if i.only}
#: Semantic conventions: the release of opentelemetry-semantic-conventions that names and units were taken from.
SEMCONV: Final = "0.66b2"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"


def by_name() -> dict[str, Instrument]:
    """Return all metrics by their names in OTLP."""
    return {i.name: i for i in METRICS}


def by_series() -> dict[str, Instrument]:
    """Return all metrics by the names of their series in Prometheus, those of histograms included."""
    out: dict[str, Instrument] = {}
    for i in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if i.kind == "histogram" else ("",)
        out |= {i.prometheus + suffix: i for suffix in suffixes}
    return out
