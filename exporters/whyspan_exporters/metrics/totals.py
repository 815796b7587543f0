"""Totals over all collectors that ever connected: one that restarts begins at 0 again, these do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from whyspan_exporters.metrics.instrument import OTHER

Key = tuple[str, str, str]  # name, service, label

_MAX_INSTANCES: Final = 8
_MAX_KEYS: Final = 2000


class Totals:
    """At most some 2,000 of them; what finds no room is added up under `OTHER`."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._ended: dict[Key, float] = {}
        self._running: OrderedDict[str, dict[Key, float]] = OrderedDict()
        self._by_name: dict[str, list[tuple[str, str, float]]] | None = None

    def put(self, instance: str, values: Mapping[Key, float]) -> None:
        """Take the newest totals of *instance*."""
        self._by_name = None
        self._running.setdefault(instance, {}).update(values)
        self._running.move_to_end(instance)
        while len(self._running) > _MAX_INSTANCES:
            _, last = self._running.popitem(last=False)
            add(self._ended, last)

    def of(self, name: str) -> list[tuple[str, str, float]]:
        """Return (service, label, total) of everything counted as *name*."""
        if self._by_name is None:  # asked for by each metric of a snapshot
            sums: dict[Key, float] = {}
            for values in (self._ended, *self._running.values()):
                add(sums, values)
            self._by_name = {}
            for (counted, service, what), value in sums.items():
                self._by_name.setdefault(counted, []).append((service, what, value))
        return list(self._by_name.get(name, ()))


def add(out: dict[Key, float], values: Mapping[Key, float]) -> None:
    """Add *values* to *out*, of which the bound holds."""
    for key, value in values.items():
        known = key if key in out or len(out) < _MAX_KEYS else (key[0], *OTHER)
        out[known] = out.get(known, 0.0) + value
