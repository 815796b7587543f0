"""Cells and lines of the view. Everything is plain text: names come from clients and watched processes."""

from __future__ import annotations

import textwrap
from datetime import UTC, datetime
from typing import Final

from rich.text import Text
from whyspan_exporters import schema
from whyspan_exporters.listed import Listed

from whyspan.text import clean
from whyspan.views.glance import CauseLine, Glance, ServiceLine

_BAR: Final = 28
_FACTS: Final = 12  # where the facts of a report begin
_NARROW: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
#: Titles and widths of the columns, their gaps included: 80 characters in all, with a scroll bar. Those of numbers end
#: with their column.
SERVICES: Final = (
    *(("service", 18), ("req/s", 8), ("TTFT P50", 11), ("TTFT P99", 11)),
    *(("total P99", 11), ("slow", 9), ("failed", 9)),
)
ROWS: Final = (("UTC", 9), ("service", 11), ("total", 8), ("TTFT", 9), ("cause", 30), ("culprit", 12))
NUMBERS: Final = frozenset({"req/s", "TTFT P50", "TTFT P99", "total P99", "slow", "failed", "total", "TTFT"})
TAIL: Final = f"{'tail by cause':<29}{'time beyond the usual':<{_BAR}}{'':>11}requests"
_FIXED: Final = sum(width for _, width in ROWS[:-1]) + 1


def title(text: str, width: int) -> Text:
    """Return the head of a column, above its cells."""
    return Text(f"{text.rjust(width - 1)} " if text in NUMBERS else text, "bold")


def last_width(columns: int) -> int:
    """Return the width of the last column of requests: what a terminal leaves for it."""
    return max(columns - _FIXED, ROWS[-1][1])


def ms(value: float | None) -> str:
    """Return a time with its unit in at most 8 characters."""
    if value is None:
        return "-"
    if value >= 60_000:
        return f"{value / 60_000:.1f} min"
    return (
        f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    )


def service(line: ServiceLine) -> list[Text]:
    """Return the cells of a service."""
    cells = (
        (f"{line.per_s:.1f}" if line.requests else "-", ""),
        (ms(line.ttft_p50_ms), ""),
        (ms(line.ttft_p99_ms), "bold"),
        (ms(line.latency_p99_ms), ""),
        (f"{line.slow}", "yellow" if line.slow else "dim"),
        (f"{line.failed}", "red" if line.failed else "dim"),
    )
    name = Text(clean(line.service, SERVICES[0][1] - 1) or "(none)")
    widths = [width for _, width in SERVICES[1:]]
    return [name, *(_right(text, width, style) for (text, style), width in zip(cells, widths, strict=True))]


def row(line: Listed, last: int = ROWS[-1][1]) -> list[Text]:
    """Return the cells of a request; the last is so wide."""
    failed = bool(line.slow & schema.FAILED_BIT)
    cause = clean(line.cause, 40) or "unknown"
    if failed:
        cause = f"{clean(str(line.status or line.outcome), 7)}: {cause}"
    at = datetime.fromtimestamp(max(line.start_unix_ns, 0) // 1_000_000_000, UTC)
    style = "red" if failed else "dim" if line.cause == "unknown" else "yellow"
    return [
        Text(f"{at:%H:%M:%S}"),
        Text(clean(line.service, ROWS[1][1] - 1)),
        _right(ms(line.latency_ns / 1e6), ROWS[2][1]),
        _right(ms(None if line.ttft_ns is None else line.ttft_ns / 1e6), ROWS[3][1]),
        Text(clean(cause, ROWS[4][1] - 1), style),
        Text(clean(line.culprit, last)),
    ]


def causes(lines: list[CauseLine], count: int) -> Text:
    """Return the tail by cause: a bar each, the excess and the number of requests."""
    out = Text()
    most = max((line.excess_ms for line in lines), default=0.0)
    for number, line in enumerate(lines[:count]):
        out.append("\n" * bool(number))
        style = "dim" if line.cause == "unknown" else "yellow"
        out.append(f"{clean(line.cause, 28) or '(ordinary)':<29}", style)
        out.append(f"{bar(line.excess_ms, most):<{_BAR}}", style)
        out.append(f"{ms(line.excess_ms):>10} {line.requests:>8}")
    return out if lines else Text("no slow requests", "dim")


def wrapped(report: str, width: int) -> str:
    """Return a report with its long lines broken, the rest of each set in: where its facts begin."""
    out: list[str] = []
    for line in report.split("\n"):
        inset = 0 if width < _NARROW else _FACTS if line.startswith("  ") else 2
        out += textwrap.wrap(line, max(width, 1), subsequent_indent=" " * inset) or [""]
    return "\n".join(out)


def bar(value: float, most: float, width: int = _BAR) -> str:
    """Return a bar in eighths of a character; none is empty that stands for something."""
    eighths = round(value / most * width * 8) if most > 0 else 0
    eighths = min(max(eighths, 1 if value > 0 else 0), width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def head(seen: Glance | None, window: str, chosen: str, error: str, paused: bool) -> Text:
    """Return the top line."""
    out = Text("whyspan top", "bold")
    if error:  # the most important thing, where the narrowest terminal shows it
        return out.append(f"  {clean(error, 200)}", "red")
    out.append(f"  last {window}  {clean(chosen, 20) or 'all services'}")
    if seen is not None:
        at = datetime.fromtimestamp(seen.now_unix_ns // 1_000_000_000, UTC)
        out.append(f"  {at:%H:%M:%S} UTC")
    if paused:
        out.append("  paused", "yellow")
    elif seen is not None and not seen.running:
        out.append("  no collector is running", "yellow")
    return out


def _right(text: str, width: int, style: str = "") -> Text:
    return Text(f"{text.rjust(width - 1)} ", style)
