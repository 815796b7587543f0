"""Exemplars of the histograms: for each bucket of each series the newest explained request that fell into it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from whyspan.tally import Series, bucket

from whyspan_exporters.metrics.instrument import Exemplar

_MAX: Final = 2000
_Key = tuple[str, Series, int]  # histogram, series, bucket


class Exemplars:
    """Bounded; the oldest go first."""

    def __init__(self) -> None:
        """Begin with none."""
        self._newest: OrderedDict[_Key, Exemplar] = OrderedDict()

    def put(self, name: str, series: Series, exemplar: Exemplar) -> None:
        """Keep an exemplar of a histogram."""
        key = name, series, bucket(exemplar.value)
        self._newest[key] = exemplar
        self._newest.move_to_end(key)
        while len(self._newest) > _MAX:
            self._newest.popitem(last=False)

    def of(self, name: str, series: Series, known: Collection[Series]) -> tuple[Exemplar, ...]:
        """Return those of a series, lowest value first.

        A finding may not know the model that the counts know: it is of the series with one, where none is without.
        """
        wanted = {series}
        if series.model and series._replace(model="") not in known:
            wanted.add(series._replace(model=""))
        found = {k[2]: e for k, e in self._newest.items() if k[0] == name and k[1] in wanted}
        return tuple(found[n] for n in sorted(found))
