"""Recordings: the batches of a run in a file, versioned and checksummed, and the way back.

Layout: ``WHYSPAN\\0``, u16 version, then blocks of (u8 type, u32 length, u32 crc32, payload). Type 1 is the header,
once and first; type 2 a batch. Integers are little-endian. A batch is msgpack; its events are the raw 56-byte
records. Request heads are stored parsed and sanitised: the raw text never reaches a file.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from whyspan_probes.schema import EVENT, HEAD_FIELDS, EventType, Schema

from whyspan.errors import RecordingError
from whyspan.marks import Mark
from whyspan.model import Batch, Fact, HttpHead

MAGIC = b"WHYSPAN\0"
VERSION = 1
_BLOCK = struct.Struct("<BII")
_HEADER, _BATCH = 1, 2
_MAX_BLOCK = 1 << 30
_FORMAT = re.compile(r"[<|][uiSV]\d{1,2}")


class _Type(msgspec.Struct, array_like=True):
    name: str
    kind: int
    fields: list[tuple[str, str, int]]  # name, format, offset


class Header(msgspec.Struct, kw_only=True):
    """What replay needs beside the batches: the engine's settings as data, the baseline, the clock offset."""

    whyspan: str
    kernel: str
    unix_offset_ns: int
    instance: str
    settings: dict[str, Any] = {}
    baseline: dict[str, Any] = {}
    types: list[_Type] = []


class _Batch(msgspec.Struct, array_like=True):
    now_ns: int
    events: bytes
    heads: list[HttpHead]
    facts: list[Fact]
    lost: dict[str, int]
    marks: list[Mark] = []


def _types(schema: Schema) -> list[_Type]:
    out = []
    for t in schema.types.values():
        fields: Any = t.dtype.fields or {}
        out.append(_Type(t.name, t.kind, [(n, fields[n][0].str, fields[n][1]) for n in t.dtype.names or ()]))
    return out


class Writer:
    """Appends batches. A write that fails (a full disk) raises OSError and leaves every earlier block readable."""

    def __init__(self, path: Path, header: Header, schema: Schema) -> None:
        header.types = _types(schema)
        # No buffer: what a full disk refused must not be tried again when the file is closed.
        self._file: RawIOBase = path.open("wb", buffering=0)
        self.bytes = 0
        try:
            self._write(MAGIC + struct.pack("<H", VERSION))
            self._block(_HEADER, msgspec.msgpack.encode(header))
        except OSError:
            self._file.close()
            raise

    def add(self, batch: Batch) -> None:
        """Append one batch."""
        record = _Batch(
            batch.now_ns,
            np.ascontiguousarray(batch.events).tobytes(),
            batch.heads,
            batch.facts,
            batch.lost,
            batch.marks,
        )
        self._block(_BATCH, msgspec.msgpack.encode(record))

    def _block(self, kind: int, payload: bytes) -> None:
        self._write(_BLOCK.pack(kind, len(payload), zlib.crc32(payload)) + payload)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) or 0 :]
        self.bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Reader:
    """Reads a recording. ``torn`` tells, after iteration, why it ended early; empty when it was whole.

    Raises:
        RecordingError: not a recording, of another version, or without a readable header.
    """

    def __init__(self, path: Path) -> None:
        self.torn = ""
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as e:
            raise RecordingError(f"{path}: {e.strerror}") from e
        try:
            self._read_header(path)
        except RecordingError:
            self._file.close()
            raise

    def _read_header(self, path: Path) -> None:
        start = self._file.read(len(MAGIC) + 2)
        if len(start) < len(MAGIC) + 2 or not start.startswith(MAGIC):
            raise RecordingError(f"{path}: not a whyspan recording")
        (version,) = struct.unpack("<H", start[len(MAGIC) :])
        if version != VERSION:
            raise RecordingError(f"{path}: recording version {version}, this whyspan reads version {VERSION}")
        block = self._next()
        if block is None or block[0] != _HEADER:
            raise RecordingError(f"{path}: the header is torn{': ' + self.torn if self.torn else ''}")
        try:
            self.header = msgspec.msgpack.decode(block[1], type=Header)
            self.schema = Schema(EventType(t.name, t.kind, _dtype(t)) for t in self.header.types)
        except (msgspec.DecodeError, ValueError, TypeError, OverflowError) as e:
            raise RecordingError(f"{path}: the header cannot be read: {e}") from e

    def _next(self) -> tuple[int, bytes] | None:
        at = self._file.tell()
        head = self._file.read(_BLOCK.size)
        if not head:
            return None
        if len(head) < _BLOCK.size:
            self.torn = f"cut off at byte {at}"
            return None
        kind, length, crc = _BLOCK.unpack(head)
        if length > _MAX_BLOCK:
            self.torn = f"garbage at byte {at}"
            return None
        payload = self._file.read(length)
        if len(payload) < length:
            self.torn = f"cut off at byte {at}"
            return None
        if zlib.crc32(payload) != crc:
            self.torn = f"checksum mismatch at byte {at}"
            return None
        return kind, payload

    def batches(self) -> Iterator[Batch]:
        """Yield the batches up to the end or to the first damage."""
        while block := self._next():
            if block[0] != _BATCH:
                continue
            try:
                b = msgspec.msgpack.decode(block[1], type=_Batch)
                events = np.frombuffer(b.events, dtype=EVENT)
            except (msgspec.DecodeError, ValueError) as e:
                self.torn = f"unreadable batch: {e}"
                return
            yield Batch(b.now_ns, events, b.heads, b.facts, b.lost, b.marks)

    def read_ratio(self) -> float:
        """Return how much of the file has been read, 0..1; of what has no size, 0."""
        size = os.fstat(self._file.fileno()).st_size
        return min(self._file.tell() / size, 1.0) if size else 0.0

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _dtype(t: _Type) -> np.dtype[Any]:
    for _, fmt, _ in t.fields:
        if not _FORMAT.fullmatch(fmt):  # a file must not be able to ask for Python objects
            raise ValueError(f"field format {fmt!r}")
    common: Any = EVENT.fields
    for name in HEAD_FIELDS:
        if (name, common[name][0].str, common[name][1]) not in t.fields:
            raise ValueError(f"event {t.name}: no field {name}")
    spec: Any = {
        "names": [f[0] for f in t.fields],
        "formats": [f[1] for f in t.fields],
        "offsets": [f[2] for f in t.fields],
        "itemsize": EVENT.itemsize,
    }
    dtype: np.dtype[Any] = np.dtype(spec)
    return dtype
