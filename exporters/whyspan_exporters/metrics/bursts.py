"""Metrics of bursts: how many there were, and what the newest malloc burst found, by thread name and size.

The figures are of the seconds that the burst was on, and are there for a quarter of an hour after it. The collector
bounds how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from whyspan.text import clean

from whyspan_exporters.metrics.figures import Figures, number
from whyspan_exporters.metrics.instrument import SERVICE, Instrument, Labels, Point, Read, counter, gauge

_THREAD: Final = "whyspan.thread"
_SIZE: Final = "whyspan.size_class"
_LABELS: Final = (SERVICE, _THREAD, _SIZE)
_MAX_ROWS: Final = 32
_LABEL_CHARS: Final = 64


def _rows(figures: Figures) -> list[Any]:
    bursts = figures.collector().get("bursts")
    rows = bursts.get("malloc") if isinstance(bursts, dict) else None
    return rows[:_MAX_ROWS] if isinstance(rows, list) else []


def _malloc(field: str, scale: float = 1.0) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        for row in _rows(figures):
            if isinstance(row, dict) and (value := number(row.get(field))) is not None:
                found = {SERVICE: "service", _THREAD: "thread", _SIZE: "size_class"}
                labels: Labels = {k: clean(str(row.get(v)), _LABEL_CHARS) for k, v in found.items()}
                yield Point(value * scale, labels)

    return read


def _count(figures: Figures) -> Iterator[Point]:
    for kind, result, value in figures.totals("bursts"):
        yield Point(value, {"whyspan.burst": kind, "whyspan.result": result})


INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    counter(
        "whyspan.burst.count",
        "{burst}",
        "Bursts that slow requests triggered.",
        _count,
        "whyspan.burst",
        "whyspan.result",
    ),
    gauge(
        "whyspan.burst.malloc.blocked",
        "s",
        "Time asleep within a call of the allocator, mean of the newest burst.",
        _malloc("mean_blocked_ns", 1e-9),
        *_LABELS,
        whole=False,
    ),
    gauge(
        "whyspan.burst.malloc.lock_waits",
        "{acquisition}",
        "Acquisitions of an allocator's lock that blocked, during the newest burst.",
        _malloc("lock_waits"),
        *_LABELS,
    ),
    gauge(
        "whyspan.burst.malloc.calls",
        "{call}",
        "Calls of the allocator during the newest burst.",
        _malloc("calls"),
        *_LABELS,
    ),
)
