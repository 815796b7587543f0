"""What a metric is here: a name, its attributes, and where to read its values when a snapshot is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from whyspan_exporters.metrics.naming import metric_name

if TYPE_CHECKING:
    from whyspan_exporters.metrics.figures import Figures

SERVICE: Final = "whyspan.service"
#: Specification, Metrics SDK, cardinality limits: the one attribute of the series that takes what has no room.
OVERFLOW: Final = "otel.metric.overflow"

Labels = dict[str, str | bool]


class Exemplar(NamedTuple):
    """One explained request behind a value; ids in hexadecimal."""

    value: float
    unix_ns: int
    trace_id: str
    span_id: str


class Buckets(NamedTuple):
    """A histogram's counts per bucket, the last of them above the highest bound, and the sum of the values."""

    counts: tuple[int, ...]
    total: float


class Point(NamedTuple):
    """A value with its labels."""

    value: float | Buckets
    labels: Labels
    exemplars: tuple[Exemplar, ...] = ()


Read = Callable[["Figures"], Iterable[Point]]


class Instrument(NamedTuple):
    """A metric; points with the same labels are added up."""

    kind: str  # counter: only rises; updown: may be summed over hosts; gauge: may not; histogram
    name: str
    unit: str  # UCUM
    description: str
    attributes: tuple[str, ...]  # those that its points may have
    read: Read
    whole: bool = True  # its values are whole numbers
    source: str = (
        "collector"  # since when it counts: collector, exporter (their starts), spool (since it was made)
    )
    only: str = ""  # where it has values, if not everywhere

    @property
    def prometheus(self) -> str:
        """The name of its series in Prometheus; of a histogram without ``_bucket``."""
        return metric_name(self.name, self.unit, self.kind)


def counter(
    name: str,
    unit: str,
    description: str,
    read: Read,
    *attributes: str,
    whole: bool = True,
    source: str = "collector",
) -> Instrument:
    """Return a counter."""
    return Instrument("counter", name, unit, description, attributes, read, whole, source)


def updown(
    name: str, unit: str, description: str, read: Read, *attributes: str, only: str = ""
) -> Instrument:
    """Return a number that may be summed over hosts."""
    return Instrument("updown", name, unit, description, attributes, read, True, "collector", only)


def gauge(
    name: str, unit: str, description: str, read: Read, *attributes: str, whole: bool = True, only: str = ""
) -> Instrument:
    """Return a number that may not be summed."""
    return Instrument("gauge", name, unit, description, attributes, read, whole, "collector", only)


def totals(name: str, service_key: str = "", label_key: str = "", scale: float = 1.0) -> Read:
    """Read what was counted as *name*, its service and label under these attributes; an empty one is left out."""

    def read(figures: Figures) -> Iterator[Point]:
        for service, label, value in figures.totals(name):
            if (service, label) == OTHER:
                yield Point(value * scale, {OVERFLOW: True})
            else:
                labels: Labels = {service_key: service, label_key: label}
                yield Point(value * scale, {k: v for k, v in labels.items() if k})

    return read


#: Service and label of what found no room, as the link's client counts it.
OTHER: Final = ("", "other")
