"""An index over one batch's event array: rows by thread, by CPU and by key, made once per batch."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from whyspan_probes.schema import EVENT, Events, Schema, concatenate, take

#: The key that pairs the two ends of a loopback connection.
PORTS: Final = "ports"

Array = npt.NDArray[Any]


class ChunkIndex:
    """Rows of one EVENT array by thread, by CPU, or by a key field of one kind of event.

    Every answer keeps the array's time order. Threads are sorted by the low 16 bits of their id, because
    numpy sorts 16-bit keys in linear time; collisions are filtered at look-up.
    """

    def __init__(self, chunk: Events, schema: Schema) -> None:
        self.schema = schema
        # Weak: the cache below must not keep a batch alive that the recorder has let go.
        self._chunk: weakref.ref[Events] = weakref.ref(chunk)
        self._tid = chunk["tid"].copy()  # a view would keep the batch alive
        low = self._tid.astype(np.uint16)
        self._order = np.argsort(low, kind="stable")
        self._low = low[self._order]
        self._tables: dict[tuple[str, str], tuple[Array, Events]] = {}
        self._cpu: tuple[Array, Events] | None = None

    @property
    def chunk(self) -> Events:
        """The indexed array."""
        chunk: Events | None = self._chunk()
        assert chunk is not None, "an index outlived its batch"
        return chunk

    def rows(self, tid: int) -> Events:
        """Return the rows whose subject is that thread."""
        low = np.uint16(tid & 0xFFFF)
        a = self._low.searchsorted(low, "left")
        b = self._low.searchsorted(low, "right")
        at = self._order[a:b]
        return take(self.chunk, at[self._tid[at] == tid])

    def table(self, name: str, field: str, value: int) -> Events:
        """Return the rows of kind *name* whose *field* is *value*, with their own layout."""
        table = self._tables.get((name, field))
        if table is None:
            table = self._tables[name, field] = self._sorted(name, field)
        keys, rows = table
        if not len(keys):
            return rows
        wanted = keys.dtype.type(value)
        return rows[keys.searchsorted(wanted, "left") : keys.searchsorted(wanted, "right")]

    def _sorted(self, name: str, field: str) -> tuple[Array, Events]:
        rows = self.schema.select(self.chunk, name)
        if not len(rows):
            return np.empty(0, np.uint64), rows
        if field == PORTS:
            keys = rows["lport"].astype(np.uint32) << np.uint32(16) | rows["rport"].astype(np.uint32)
        else:
            keys = np.ascontiguousarray(rows[field])
        order = np.argsort(keys, kind="stable")
        return keys[order], take(rows, order)

    def switches(self, cpu: int) -> Events:
        """Return the context switches seen on that CPU, still as EVENT rows."""
        if self._cpu is None:
            kinds = [self.schema.kind("sched_switch_out"), self.schema.kind("sched_switch_in")]
            chunk = self.chunk
            kind = chunk["kind"]
            rows = take(chunk, (kind == kinds[0]) | (kind == kinds[1]))
            order = np.argsort(rows["cpu"], kind="stable")
            rows = take(rows, order)
            self._cpu = np.ascontiguousarray(rows["cpu"]), rows
        keys, rows = self._cpu
        wanted = np.uint16(cpu & 0xFFFF)
        return rows[keys.searchsorted(wanted, "left") : keys.searchsorted(wanted, "right")]


#: Indexes kept, the last used ones: an index is larger than its batch, and explanations look at the newest batches.
MAX_INDEXES: Final = 32

_cache: OrderedDict[int, tuple[weakref.ref[Any], ChunkIndex]] = OrderedDict()


def index_of(chunk: Events, schema: Schema) -> ChunkIndex:
    """Return the index of an array, made at first use and dropped with the array, or when others were used since.

    The cache goes by identity: pass the same array object again, not a new view of it. An indexed array
    must not be changed afterwards.
    """
    key = id(chunk)
    entry = _cache.get(key)
    if entry is not None and entry[0]() is chunk and entry[1].schema is schema:
        _cache.move_to_end(key)
        return entry[1]
    index = ChunkIndex(chunk, schema)
    _cache[key] = (weakref.ref(chunk, _forget(key)), index)
    _cache.move_to_end(key)
    if len(_cache) > MAX_INDEXES:
        _cache.popitem(last=False)
    return index


def _forget(key: int) -> Callable[[Any], None]:
    cache = _cache  # a module's names are gone before its last arrays at exit

    def drop(gone: weakref.ref[Any]) -> None:
        # The id may have been taken over by a newer array already.
        if key in cache and cache[key][0] is gone:
            del cache[key]

    return drop


def joined(parts: list[Events], dtype: np.dtype[Any] = EVENT) -> Events:
    """Concatenate rows of successive chunks and put them in time order if they are not already."""
    parts = [p for p in parts if len(p)]
    if not parts:
        return np.empty(0, dtype)
    rows = parts[0] if len(parts) == 1 else concatenate(parts)
    ts = rows["ts_ns"]
    if np.any(ts[1:] < ts[:-1]):
        rows = take(rows, np.argsort(ts, kind="stable"))
    return rows
