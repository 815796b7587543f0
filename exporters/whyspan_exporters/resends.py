"""Knows the findings that came before: a collector that reconnects sends again what was not acknowledged."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from whyspan_exporters.records import Explained

# More than a collector can have on its way unacknowledged, and so send again.
_REMEMBERED: Final = 4096


class Resends:
    """Bounded; what came longest ago is forgotten first."""

    def __init__(self) -> None:
        """Know none."""
        self._seen: OrderedDict[str, int] = OrderedDict()

    def knows(self, record: Explained) -> bool:
        """Return whether this very finding came before; one of a request that was open then is news."""
        end_ns = record.finding.request.end_ns
        known = self._seen.get(record.id) == end_ns
        self._seen[record.id] = end_ns
        self._seen.move_to_end(record.id)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return known
