"""Names of functions by module and offset, remembered as ranges: whatever else lies in a function has its name."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

_MAX_RANGES: Final = 20_000  # some 250 bytes each
_MAX_MODULES: Final = 1024


class Range(NamedTuple):
    """From the one offset to before the other; an empty name: no function is known to lie there."""

    start: int
    end: int
    name: str


class Names:
    """Ranges by module; of the module that was asked for longest ago they go first."""

    def __init__(self, limit: int = _MAX_RANGES) -> None:
        self._limit = limit
        self._modules: OrderedDict[Hashable, list[Range]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, module: Hashable, offset: int) -> str | None:
        """Return the name of what lies there, empty when it has none; None when that is not known yet."""
        ranges = self._modules.get(module)
        if ranges is None:
            return None
        i = bisect_right(ranges, offset, key=_start) - 1
        if i < 0 or offset >= ranges[i].end:
            return None
        self._modules.move_to_end(module)
        return ranges[i].name

    def put(self, module: Hashable, new: Range) -> None:
        """Remember a range. What it overlaps is forgotten: the newest answer holds."""
        ranges = self._modules.setdefault(module, [])
        self._modules.move_to_end(module)
        first = bisect_left(ranges, new.start, key=_start)
        if first and ranges[first - 1].end > new.start:
            first -= 1
        last = first
        while last < len(ranges) and ranges[last].start < new.end:
            last += 1
        del ranges[first:last]
        insort(ranges, new)
        self._size += 1 - (last - first)
        while len(self._modules) > 1 and (self._size > self._limit or len(self._modules) > _MAX_MODULES):
            _, gone = self._modules.popitem(last=False)
            self._size -= len(gone)
        if self._size > self._limit:  # one module alone
            self.forget(module)

    def forget(self, module: Hashable) -> None:
        """Forget all of a module."""
        self._size -= len(self._modules.pop(module, ()))


def _start(one: Range) -> int:
    return one.start
