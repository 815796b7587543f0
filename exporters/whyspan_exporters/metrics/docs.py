"""Makes docs/metrics.md: ``python -m whyspan_exporters.metrics.docs > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.tally import BOUNDS_S

from whyspan_exporters.metrics import losses
from whyspan_exporters.metrics.attributes import ATTRIBUTES
from whyspan_exporters.metrics.catalogue import GROUPS, SCHEMA_URL, SEMCONV
from whyspan_exporters.metrics.instrument import OVERFLOW, Instrument
from whyspan_exporters.metrics.naming import label_name
from whyspan_exporters.metrics.snapshot import MAX_POINTS

_KINDS: Final = {
    "counter": "counter",
    "updown": "up-down counter",
    "gauge": "gauge",
    "histogram": "histogram",
}
_HEAD: Final = f"""# Metrics

<!-- Made by `python -m whyspan_exporters.metrics.docs > docs/metrics.md`; a test compares. -->

The same metrics go out by OTLP (`[otlp]`) and can be scraped (`[prometheus] listen`). The second name is the one in
Prometheus, however they came there: the endpoint names series as Prometheus' own OTLP translation does. There,
attributes have underscores for dots (`whyspan.service` is `{label_name("whyspan.service")}`), and a gauge of unit 1
ends in `_ratio`, even where it is no ratio.

Names outside `whyspan.*` are those of OpenTelemetry's semantic conventions as of
`opentelemetry-semantic-conventions` {SEMCONV} (<{SCHEMA_URL}>); a test checks them.

* **Counts** go on when the collector restarts. Up-down counters may be summed over hosts, gauges may not.
* **Histograms** are of all requests, explained or not, with these bounds, in s:
  {", ".join(f"{b:g}" for b in BOUNDS_S)}.
* **Exemplars** (histograms, `whyspan.cause.*`) carry trace and span id of an explained request: slow, failed, or with a
  traceparent of its own; of requests whose caller decided not to sample there are none. By OTLP each goes out once.
* **Temporality** by OTLP is cumulative; `otlp.metrics_temporality`, or OpenTelemetry's variable, makes it delta.
* **Bounds**: {MAX_POINTS - 1} series of one metric ({losses.MAX_CULPRITS} names of culprits per service), 64 histograms
  of each name, 1,000 series of counts from one collector. What finds no room is added up in one series whose only
  attribute is `{OVERFLOW}` (`{label_name(OVERFLOW)}="true"`): sums stay right, and an alert on it tells.
"""


def table() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for title, instruments in GROUPS.items():
        parts.append(f"\n## {title}\n\n{_rows(instruments)}")
    parts.append(f"\n## Attributes\n\n{_attributes()}")
    return "".join(parts)


def _rows(instruments: Iterable[Instrument]) -> str:
    lines = ["| metric | kind, unit | what | attributes |", "|---|---|---|---|"]
    for i in instruments:
        kind = f"{_KINDS[i.kind]}, {_cell(f'`{i.unit}`')}"
        what = f"{i.description} *({i.only[:1].upper()}{i.only[1:]}.)*" if i.only else i.description
        names = ", ".join(f"`{a}`" for a in i.attributes) or "-"
        lines.append(f"| `{i.name}`<br>`{i.prometheus}` | {kind} | {_cell(what)} | {names} |")
    return "\n".join(lines) + "\n"


def _attributes() -> str:
    lines = ["| attribute | what | values | bounded by |", "|---|---|---|---|"]
    for name, a in ATTRIBUTES.items():
        cells = (f"`{name}`", a.description, a.values, a.bound or "-")
        lines.append(f"| {' | '.join(_cell(c) for c in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(table(), end="")
