"""Event types as numpy structures: what a record is, independent of where it came from."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: Every event struct is exactly this many bytes; with the ring buffer's 8-byte header a record takes 64.
EVENT_BYTES = 56
PAYLOAD_BYTES = 32

HEAD_FIELDS = ("ts_ns", "tid", "tgid", "kind", "cpu", "aux")

#: The common head of every event, and its 32 bytes of payload still undecoded.
EVENT: np.dtype[Any] = np.dtype(
    [
        ("ts_ns", "<u8"),  # CLOCK_MONOTONIC
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("kind", "<u2"),
        ("cpu", "<u2"),
        ("aux", "<u4"),
        ("payload", f"V{PAYLOAD_BYTES}"),
    ]
)
assert EVENT.itemsize == EVENT_BYTES

Events = npt.NDArray[Any]

#: Of arrays with so many rows the kinds are remembered; of so many arrays, the last looked at.
_MANY_ROWS, _MAX_ARRAYS = 256, 128

_RAW: np.dtype[Any] = np.dtype(f"V{EVENT_BYTES}")


def take(rows: Events, at: npt.NDArray[Any]) -> Events:
    """Return the rows at those positions, or where that mask holds; a copy with the same layout.

    As plain bytes: numpy copies structures field by field, which takes 18 times as long (2,634 rows: 288 and 16 us).
    """
    where = np.flatnonzero(at) if at.dtype == np.bool_ else at
    taken: Events = rows.view(_RAW)[where].view(rows.dtype)
    return taken


def concatenate(parts: Sequence[Events]) -> Events:
    """Return rows of one layout behind each other; a copy. As plain bytes, as in `take`."""
    whole: Events = np.concatenate([p.view(_RAW) for p in parts]).view(parts[0].dtype)
    return whole


class EventType(NamedTuple):
    """One kind of record: its name, the number it carries on this run, and its full 56-byte layout."""

    name: str
    kind: int
    dtype: np.dtype[Any]


class Schema:
    """The event types of one run or one recording, by name and by kind.

    Kind numbers are assigned when probes are loaded and differ between runs; names are stable.
    """

    def __init__(self, types: Iterable[EventType]) -> None:
        self.types: dict[str, EventType] = {}
        self.by_kind: dict[int, EventType] = {}
        for t in types:
            if t.dtype.itemsize != EVENT_BYTES:
                raise ValueError(f"event {t.name}: {t.dtype.itemsize} bytes, expected {EVENT_BYTES}")
            if t.name in self.types or t.kind in self.by_kind:
                raise ValueError(f"event {t.name}: name or kind {t.kind} declared twice")
            self.types[t.name] = t
            self.by_kind[t.kind] = t
        self._kinds: OrderedDict[int, tuple[weakref.ref[Events], frozenset[int]]] = OrderedDict()

    def kind(self, name: str) -> int:
        """Return the kind number of *name*, or -1 when no loaded probe emits it."""
        t = self.types.get(name)
        return -1 if t is None else t.kind

    def select(self, events: Events, name: str) -> Events:
        """Return the rows of that kind, in order, viewed with their own layout (a copy)."""
        t = self.types.get(name)
        if t is None:
            return events[:0]
        if len(events) >= _MANY_ROWS and t.kind not in self._kinds_in(events):
            return np.empty(0, t.dtype)
        rows: Events = take(events, events["kind"] == t.kind).view(t.dtype)
        return rows

    def _kinds_in(self, events: Events) -> frozenset[int]:
        """Return the kinds in an array; looked at once, since a batch is asked for 40 kinds and holds ten."""
        known = self._kinds.get(id(events))
        if known is not None and known[0]() is events:
            return known[1]
        kinds = frozenset(np.flatnonzero(np.bincount(events["kind"])).tolist())
        self._kinds[id(events)] = weakref.ref(events), kinds
        if len(self._kinds) > _MAX_ARRAYS:
            self._kinds.popitem(last=False)
        return kinds
