"""Decodes the KV-cache event batches of vLLM and SGLang. Pure; no token id is ever made into an object.

Three shapes are in the wild: a batch that is an array ``[ts, events, rank]`` with events as positional arrays
``["BlockStored", ...]`` (vLLM up to about 0.22) or as maps with a ``type`` (since vllm PR 42892, and SGLang), and a
batch that is a map (vllm 0181ea31). Fields are taken by name where there are names; what is unknown is skipped: new
optional fields keep arriving.

``token_ids`` are prompt content. The types below have no such field, and msgspec skips what has none.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw

from whyspan.feeds.sequence import number
from whyspan.marks import KvBlocks
from whyspan.text import clean

#: A batch of one step with 64 k new tokens has 0.4 MB.
MAX_PAYLOAD: Final = 4 << 20
_MAX_EVENTS: Final = 16_384
_MAX_HASHES: Final = 65_536  # of one event
_MAX_BATCH_HASHES: Final = 262_144
_HASHES_PER_BODY: Final = 256  # as `KvBlocks` has it
_MAX_BLOCK_SIZE: Final = 1 << 20  # tokens
_MASK = (1 << 64) - 1
_MAX_GROUP: Final = 1 << 16

_Hash = int | Annotated[bytes, Meta(max_length=64)]
_Hashes = Annotated[list[_Hash], Meta(max_length=_MAX_HASHES)]
_Size = Annotated[int, Meta(ge=0, le=_MAX_BLOCK_SIZE)]
_Medium = Annotated[str, Meta(max_length=64)]
_Group = Annotated[int, Meta(ge=0, le=_MAX_GROUP)]


class KvDecodeError(ValueError):
    """A payload that is no batch of KV events; the message never quotes it."""


class Decoded(NamedTuple):
    """A batch: when it was made (Unix time in s), what it says, its events, and how many of them are of new kinds."""

    unix_s: float
    bodies: list[KvBlocks]
    events: int
    unknown: int


class _Skipped(msgspec.Struct, array_like=True):
    """An array of which nothing is wanted: each of its elements is skipped, none becomes an object."""


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=_MAX_EVENTS)]
    rank: int | None = None


class _MapBatch(msgspec.Struct):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=_MAX_EVENTS)]
    data_parallel_rank: int | None = None  # vLLM's name
    attn_dp_rank: int | None = None  # SGLang's


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: _Hashes
    block_size: _Size = 0
    medium: _Medium | None = None
    group_idx: _Group | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: _Medium | None = None
    group_idx: _Group | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: _Skipped | None
    block_size: _Size
    lora_id: int | None = None
    medium: _Medium | None = None
    lora_name: str | None = None
    extra_keys: _Skipped | None = None
    group_idx: _Group | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: _Medium | None = None
    group_idx: _Group | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _Type(msgspec.Struct):
    type: str


class _TypeArray(msgspec.Struct, array_like=True):
    type: str


_KNOWN: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_array_batch = msgspec.msgpack.Decoder(_ArrayBatch)
_map_batch = msgspec.msgpack.Decoder(_MapBatch)
_MapEvent = _Stored | _Removed | _Cleared
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray
_map_event: msgspec.msgpack.Decoder[_MapEvent] = msgspec.msgpack.Decoder(_MapEvent)
_array_event: msgspec.msgpack.Decoder[_ArrayEvent] = msgspec.msgpack.Decoder(_ArrayEvent)
_map_type, _array_type = msgspec.msgpack.Decoder(_Type), msgspec.msgpack.Decoder(_TypeArray)
#: What decoding hostile bytes may raise.
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError)


def _is_map(first: int) -> bool:
    # msgpack: fixmap, map 16, map 32
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _event(raw: Raw) -> _MapEvent | _ArrayEvent | None:
    """Return an event, or None for one of a kind that is new."""
    data = memoryview(raw)
    as_map = bool(data) and _is_map(data[0])
    try:
        return _map_event.decode(data) if as_map else _array_event.decode(data)
    except msgspec.ValidationError:
        kind = (_map_type if as_map else _array_type).decode(data).type
        if kind in _KNOWN:
            raise
        return None


class _Bodies:
    """Gathers events into bodies. A body means: cleared, then removals, then what was stored."""

    def __init__(self, engine: str, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._done: list[KvBlocks] = []
        self._open: dict[tuple[str, int, int], tuple[list[int], list[int]]] = {}
        self._hashes = 0

    def take(self, event: _MapEvent | _ArrayEvent) -> None:
        """Take in the next event of the batch.

        Raises:
            KvDecodeError: it has too many blocks.
        """
        if isinstance(event, (_Stored, _StoredArray)):
            self._add(event, event.block_size, stored=True)
        elif isinstance(event, (_Removed, _RemovedArray)):
            self._add(event, 0, stored=False)
        else:
            self._close()
            self._done.append(KvBlocks(engine=self._engine, rank=self._rank, cleared=1))

    def finish(self) -> list[KvBlocks]:
        """Return the bodies, in the order of the events."""
        self._close()
        return self._done

    def _add(self, event: _Stored | _StoredArray | _Removed | _RemovedArray, size: int, stored: bool) -> None:
        hashes = [_low64(h) for h in event.block_hashes]
        self._hashes += len(hashes)
        if self._hashes > _MAX_BATCH_HASHES:
            raise KvDecodeError("a batch of too many blocks")
        medium, group = _medium(event.medium or ""), event.group_idx or 0
        if not stored:
            # Stored and removed in one batch: the order counts, so the body that holds the first ends.
            for key, (had, _) in list(self._open.items()):
                if key[:2] == (medium, group) and not set(had).isdisjoint(hashes):
                    self._close()
                    break
            size = next((k[2] for k in self._open if k[:2] == (medium, group)), 0)
        lists = self._open.get((medium, group, size))
        if lists is None:
            unsized = self._open.pop((medium, group, 0), None) if size else None
            lists = self._open[medium, group, size] = unsized or ([], [])
        lists[0 if stored else 1].extend(hashes)

    def _close(self) -> None:
        for (medium, group, size), (stored, removed) in self._open.items():
            if len(stored) <= _HASHES_PER_BODY and len(removed) <= _HASHES_PER_BODY:
                self._body(medium, group, size, stored, removed)
                continue
            for at in range(0, len(removed), _HASHES_PER_BODY):
                self._body(medium, group, size, [], removed[at : at + _HASHES_PER_BODY])
            for at in range(0, len(stored), _HASHES_PER_BODY):
                self._body(medium, group, size, stored[at : at + _HASHES_PER_BODY], [])
        self._open.clear()

    def _body(self, medium: str, group: int, size: int, stored: list[int], removed: list[int]) -> None:
        self._done.append(
            KvBlocks(
                engine=self._engine,
                rank=self._rank,
                stored=len(stored),
                stored_tokens=len(stored) * size,
                removed=len(removed),
                block_size=size,
                medium=medium,
                group=group,
                hashes=stored,
                removed_hashes=removed,
            )
        )


@lru_cache(64)
def _medium(name: str) -> str:
    return clean(name, 32)


def _low64(value: int | bytes) -> int:
    # vLLM's integers are the low 64 bits of the digest too; SGLang's are signed.
    return (value if isinstance(value, int) else int.from_bytes(value[-8:], "big")) & _MASK


def decode(payload: bytes, engine: str, rank: int = 0) -> Decoded:
    """Return what a batch says.

    Args:
        payload: msgpack, the last frame of a message.
        engine: Goes into the bodies.
        rank: Goes into the bodies of a batch that does not name its own.

    Raises:
        KvDecodeError: it is no batch of KV events, or over a bound.
    """
    if not payload or len(payload) > MAX_PAYLOAD:
        raise KvDecodeError(f"a batch of {len(payload)} bytes")
    try:
        if _is_map(payload[0]):
            m = _map_batch.decode(payload)
            ts, raws = m.ts, m.events
            own = m.attn_dp_rank if m.data_parallel_rank is None else m.data_parallel_rank
        else:
            a = _array_batch.decode(payload)
            ts, raws, own = a.ts, a.events, a.rank
        own = rank if own is None else own
        bodies, unknown = _Bodies(engine, own if 0 <= own < 1 << 16 else rank), 0
        for raw in raws:
            event = _event(raw)
            if event is None:
                unknown += 1
            else:
                bodies.take(event)
    except _ERRORS as e:
        raise KvDecodeError(f"not a batch of KV events: {type(e).__name__}") from None
    return Decoded(ts if math.isfinite(ts) else 0.0, bodies.finish(), len(raws), unknown)


class Replayed(NamedTuple):
    """A batch from the replay endpoint; ``seq`` -1 is the end of the replay."""

    seq: int
    payload: bytes


END: Final = -1


def replay_reply(frames: list[bytes]) -> Replayed:
    """Return what a reply to a DEALER holds, with the topic (``["", topic, seq, payload]``) or without it (older).

    Raises:
        KvDecodeError: it is no such reply.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise KvDecodeError(f"a replay reply of {len(frames)} frames")
    seq = number(frames[-2])
    if seq is None or seq < END:
        raise KvDecodeError("a replay reply without its number")
    return Replayed(seq, frames[-1])
