"""What a metric is here: a name, and where to read its values when the SDK asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from whyspan_exporters.otlp.figures import Figures

Point = tuple[float, dict[str, str]]
Read = Callable[[Figures], Iterable[Point]]

SERVICE: Final = "whyspan.service"


class Instrument(NamedTuple):
    """An observable instrument; points with the same labels are added up."""

    kind: str  # counter: only rises; updown: may be summed over hosts; gauge: may not
    name: str
    unit: str
    description: str
    read: Read
    whole: bool = True  # its values are whole numbers


def totals(name: str, service_key: str = "", label_key: str = "", scale: float = 1.0) -> Read:
    """Read what was counted as *name*, its service and label under these attributes; an empty one is left out."""

    def read(figures: Figures) -> Iterator[Point]:
        for service, label, value in figures.totals(name):
            labels = {service_key: service, label_key: label}
            yield value * scale, {k: v for k, v in labels.items() if k}

    return read
