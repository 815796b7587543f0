"""Metrics of explained requests: which causes, how much time they cost, and who did it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from whyspan_exporters.metrics import losses
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.instrument import SERVICE, Instrument, Point, Read, counter

_CAUSE: Final = "whyspan.cause"
_MODEL: Final = "gen_ai.request.model"


def _found(name: str) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        yield from figures.found(name)

    return read


def _counter(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return counter(name, unit, description, _found(name), *attributes, whole=unit != "s", source="exporter")


INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    _counter(
        losses.FINDINGS,
        "{finding}",
        "Requests explained, by cause; none: it was not slow.",
        SERVICE,
        _CAUSE,
    ),
    _counter(
        losses.TOKENS,
        "{token}",
        "Tokens of the requests explained, by type and by the tag of the template.",
        SERVICE,
        "whyspan.template",
        "gen_ai.token.type",
    ),
    _counter(
        losses.EXCESS,
        "s",
        "Time beyond the usual that a cause cost the requests explained. Of requests slow or failed that could not be "
        "explained whyspan.request.not_explained tells the number.",
        SERVICE,
        _CAUSE,
        _MODEL,
        "whyspan.phase",
    ),
    _counter(
        losses.CULPRIT,
        "s",
        "The same by who did it, where somebody is named.",
        SERVICE,
        _CAUSE,
        "whyspan.culprit.kind",
        "whyspan.culprit.name",
    ),
)
