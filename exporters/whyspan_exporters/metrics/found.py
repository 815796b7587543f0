"""Counters of what explained requests tell. Bounded per metric; what finds no room goes to the overflow series."""

from __future__ import annotations

from typing import Final

from whyspan_exporters.metrics.instrument import OVERFLOW, Exemplar, Labels, Point

#: Series of one metric: a service has some 50 causes in 7 phases.
MAX_SERIES: Final = 1000

_Key = tuple[tuple[str, str], ...]
_Series = dict[_Key, tuple[float, Exemplar | None]]


class Found:
    """By metric and labels: a sum, and the newest request that added to it."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._series: dict[str, _Series] = {}

    def add(self, name: str, labels: dict[str, str], value: float, exemplar: Exemplar | None = None) -> None:
        """Add *value* to a series."""
        series = self._series.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        if key not in series and len(series) >= MAX_SERIES:
            key = ()
        _add(series, key, value, exemplar)

    def overflow(self, name: str, value: float, exemplar: Exemplar | None = None) -> None:
        """Add *value* to the series of what found no room."""
        _add(self._series.setdefault(name, {}), (), value, exemplar)

    def points(self, name: str) -> list[Point]:
        """Return all series of a metric."""
        out = []
        for key, (value, exemplar) in self._series.get(name, {}).items():
            labels: Labels = dict(key) if key else {OVERFLOW: True}
            out.append(Point(value, labels, (exemplar,) if exemplar else ()))
        return out


def _add(series: _Series, key: _Key, value: float, exemplar: Exemplar | None) -> None:
    before, last = series.get(key, (0.0, None))
    series[key] = before + value, exemplar or last
