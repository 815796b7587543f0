"""A dictionary of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A dictionary that forgets what was written or read longest ago once it holds *limit* entries."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.evicted = 0
        self._items: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """Return the value and count it as used, or None."""
        value = self._items.get(key)
        if value is not None:
            self._items.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Store the value; the entry used longest ago makes room."""
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self.limit:
            self._items.popitem(last=False)
            self.evicted += 1

    def pop(self, key: K) -> None:
        """Forget an entry, if there is one."""
        self._items.pop(key, None)

    def items(self) -> list[tuple[K, V]]:
        """Return all keys with their values, longest unused first."""
        return list(self._items.items())

    def values(self) -> list[V]:
        """Return all values, longest unused first."""
        return list(self._items.values())
