"""The requests beside a request: the latest ones of each service, for causes that lie in more than one of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from whyspan.model import Request

_MAX_SERVICES: Final = 64
_MAX_REQUESTS: Final = 2048  # of a service; at 100 a second, 20 s of them


class Beside:
    """Requests in the order in which they began, those in progress among them. Bounded; what is older is forgotten.

    It holds the requests themselves: one that ends later is seen to have ended.
    """

    def __init__(self, limit: int = _MAX_REQUESTS) -> None:
        self._limit = limit
        self._services: OrderedDict[str, deque[Request]] = OrderedDict()

    def begun(self, requests: Iterable[Request]) -> None:
        """Take in requests that have begun."""
        for r in requests:
            kept = self._services.get(r.service)
            if kept is None:
                kept = self._services[r.service] = deque(maxlen=self._limit)
                if len(self._services) > _MAX_SERVICES:
                    self._services.popitem(last=False)
            kept.append(r)
            self._services.move_to_end(r.service)

    def arrived(self, service: str, since_ns: int, until_ns: int) -> list[Request]:
        """Return the requests of a service that began in [since, until], oldest first."""
        found = [r for r in self._services.get(service, ()) if since_ns <= r.start_ns <= until_ns]
        return sorted(found, key=lambda r: (r.start_ns, r.cookie, r.seq))

    def around(self, service: str, start_ns: int, end_ns: int) -> list[Request]:
        """Return the requests of a service that were in progress at some time in [start, end], oldest first."""
        kept = self._services.get(service, ())
        found = [r for r in kept if r.start_ns < end_ns and (not r.end_ns or r.end_ns > start_ns)]
        return sorted(found, key=lambda r: (r.start_ns, r.cookie, r.seq))
