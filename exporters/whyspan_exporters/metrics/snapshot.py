"""All metrics at one moment: what every way out is made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from whyspan_exporters.metrics.catalogue import METRICS
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.instrument import OVERFLOW, Buckets, Exemplar, Instrument, Labels, Point

#: Series of one metric, whatever its reader comes up with.
MAX_POINTS: Final = 1001

_Key = tuple[tuple[str, str | bool], ...]


class Family(NamedTuple):
    """A metric with its points, which add up since ``since_unix_ns``."""

    instrument: Instrument
    points: list[Point]
    since_unix_ns: int
    delta: bool = False


class Snapshot(NamedTuple):
    """The metrics that have any value, at ``unix_ns``."""

    families: list[Family]
    unix_ns: int


def take(figures: Figures, unix_ns: int) -> Snapshot:
    """Return the metrics as of now, which is *unix_ns*."""
    families = []
    for instrument in METRICS:
        points = _merged(instrument.read(figures), instrument.whole)
        if points:
            families.append(Family(instrument, points, figures.since_unix_ns(instrument.source)))
    return Snapshot(families, unix_ns)


def key_of(labels: Labels) -> _Key:
    """Return what tells a series from the others of its metric."""
    return tuple(sorted(labels.items()))


def _merged(points: Iterable[Point], whole: bool) -> list[Point]:
    """Add up points with the same labels: no receiver takes two of them."""
    found: dict[_Key, Point] = {}
    for point in points:
        key, labels = key_of(point.labels), point.labels
        if key not in found and len(found) >= MAX_POINTS - 1:
            labels = {OVERFLOW: True}
            key = key_of(labels)
        before = found.get(key)
        value, exemplars = point.value, point.exemplars
        if before is not None:
            value, exemplars = _sum(before.value, value), (*before.exemplars, *exemplars)
        found[key] = Point(value, labels, exemplars)
    return [_whole(p) if whole else p for p in found.values()]


def _sum(one: float | Buckets, other: float | Buckets) -> float | Buckets:
    if isinstance(one, Buckets) and isinstance(other, Buckets):
        return Buckets(
            tuple(a + b for a, b in zip(one.counts, other.counts, strict=True)), one.total + other.total
        )
    assert not isinstance(one, Buckets) and not isinstance(other, Buckets)  # of one metric
    return one + other


def _whole(point: Point) -> Point:
    return point if isinstance(point.value, Buckets) else point._replace(value=int(point.value))


class Fresh:
    """Leaves out the exemplars that went out before: OTLP carries those of the time since the last export."""

    def __init__(self) -> None:
        """Nothing went out yet."""
        self._sent: set[tuple[str, Exemplar]] = set()

    def of(self, snapshot: Snapshot, whole: Snapshot) -> Snapshot:
        """Return *snapshot* with new exemplars only, and remember them.

        Args:
            snapshot: What goes out.
            whole: What it was made from: an exemplar of a series that does not go out now is still new next time.
        """
        sent: set[tuple[str, Exemplar]] = set()
        families = []
        for family in snapshot.families:
            name = family.instrument.name
            points = []
            for p in family.points:
                new = tuple(e for e in p.exemplars if (name, e) not in self._sent)
                sent.update((name, e) for e in new)
                points.append(p._replace(exemplars=new))
            families.append(family._replace(points=points))
        there = {(f.instrument.name, e) for f in whole.families for p in f.points for e in p.exemplars}
        self._sent = (self._sent | sent) & there
        return snapshot._replace(families=families)
