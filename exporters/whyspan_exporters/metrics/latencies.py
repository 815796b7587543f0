"""The histograms of all requests, over all collectors that ever connected."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from whyspan.tally import BOUNDS_S, NAMES, OVERFLOW, Series

from whyspan_exporters.metrics.instrument import Buckets
from whyspan_exporters.metrics.states import label, number

_MAX_INSTANCES: Final = 8
_MAX_SERIES: Final = 128
_EMPTY: Final = Buckets((0,) * (len(BOUNDS_S) + 1), 0.0)

_Histograms = dict[tuple[str, Series], Buckets]


class Latencies:
    """Totals of the collector's state; a collector that restarts begins at 0 again, these do not."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._ended: _Histograms = {}
        self._running: OrderedDict[str, _Histograms] = OrderedDict()

    def put(self, instance: str, said: Any) -> None:
        """Take the newest totals of *instance*, as `whyspan.tally.Tally.state` has them."""
        if not isinstance(said, list):
            return
        self._running[instance] = read(said)
        self._running.move_to_end(instance)
        while len(self._running) > _MAX_INSTANCES:
            _, last = self._running.popitem(last=False)
            _add(self._ended, last)

    def all(self, name: str) -> dict[Series, Buckets]:
        """Return the histograms of *name* that hold anything, by series."""
        out: _Histograms = {}
        for histograms in (self._ended, *self._running.values()):
            _add(out, histograms)
        return {series: b for (n, series), b in out.items() if n == name and any(b.counts)}


def _add(out: _Histograms, more: _Histograms) -> None:
    for (name, series), b in more.items():
        key = name, series
        if key not in out and len(out) >= _MAX_SERIES * len(NAMES):
            key = name, OVERFLOW
        before = out.get(key, _EMPTY)
        counts = tuple(x + y for x, y in zip(before.counts, b.counts, strict=True))
        out[key] = Buckets(counts, before.total + b.total)


def read(said: Any) -> _Histograms:
    """Return the totals in what a collector says, by histogram and series; nothing of what is not as it should be."""
    found: _Histograms = {}
    for item in said[:_MAX_SERIES] if isinstance(said, list) else ():
        _add(found, _read(item))
    return found


def _read(item: Any) -> _Histograms:
    """Return what an entry says; nothing of one that is not as it should be."""
    match item:
        case [str(service), str(model), str(error), bool(overflow), list(counts), list(sums)]:
            series = OVERFLOW if overflow else Series(label(service), label(model), label(error))
        case _:
            return {}
    out: _Histograms = {}
    for name, row, total in zip(NAMES, counts, sums, strict=False):
        whole = isinstance(row, list) and all(isinstance(n, int) and 0 <= n < 1 << 63 for n in row)
        seconds = number(total)
        if whole and len(row) == len(BOUNDS_S) + 1 and seconds is not None and seconds >= 0:
            out[name, series] = Buckets(tuple(row), seconds)
    return out
