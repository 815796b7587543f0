"""Short numbers for request ids, so that a step of a thousand requests fits into a mark."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


class Numbers:
    """Numbers for live requests: given once, never used again, forgotten when the request ends."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        #: Request id: number.
        self.of: dict[str, int] = {}

    def give(self, request: str) -> int:
        """Return the request's number, a new one if it has none."""
        number = self.of.get(request)
        if number is None:
            number = self.of[request] = next(self._next)
        return number

    def drop(self, request: str) -> int | None:
        """Forget a request; return the number it had."""
        return self.of.pop(request, None)

    def keep(self, live: Container[str]) -> None:
        """Forget all but the live: those that ended while nobody watched."""
        for request in [r for r in self.of if r not in live]:
            del self.of[request]
