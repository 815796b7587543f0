"""Rings read as arrays: no per-event callback and no per-event Python object."""

from __future__ import annotations

import ctypes as ct
import mmap
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from whyspan_probes.libbpf import BPF_MAP_TYPE_RINGBUF, check, libbpf
from whyspan_probes.schema import EVENT, Events

RECORD_BYTES = 64  # the ring's 8-byte header and a 56-byte event
_WORDS = RECORD_BYTES // 8
_BUSY, _DISCARD = 0x8000_0000, 0x4000_0000  # include/uapi/linux/bpf.h, BPF_RINGBUF_*_BIT
_HEADER_BYTES = 8

_RECORD: np.dtype[Any] = np.dtype([("header", "<u8"), ("event", EVENT)])
assert _RECORD.itemsize == RECORD_BYTES

Words = npt.NDArray[np.uint64]

_FIRST_ROWS = 4096
#: Rows looked at and copied at a time: they stay in the second-level cache between the two.
_PIECE_ROWS = 2048


class _Mapping:
    """The two mappings of a BPF ring: the consumer's position, and the producer's with the data, twice in a row."""

    def __init__(self, fd: int, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = size
        self.fd = fd
        self._consumer_map = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._producer_map = mmap.mmap(fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self.consumer = np.frombuffer(self._consumer_map, dtype=np.uint64, count=1)
        self.producer = np.frombuffer(self._producer_map, dtype=np.uint64, count=1)
        self.data = np.frombuffer(self._producer_map, dtype=np.uint64, count=2 * size // 8, offset=page)

    def close(self) -> None:
        del self.consumer, self.producer, self.data
        self._consumer_map.close()
        self._producer_map.close()
        os.close(self.fd)


def create_ring(name: str, size: int) -> int:
    """Create a BPF ring of *size* bytes (a power of two, at least a page) and return its descriptor."""
    return check(
        libbpf().bpf_map_create(BPF_MAP_TYPE_RINGBUF, name.encode(), 0, 0, size, None),
        f"cannot create a {size >> 10} KiB ring",
    )


class RowBuffer:
    """Records taken out of rings, in the order taken; handed over as one array without another copy."""

    def __init__(self) -> None:
        self._rows: Words = np.empty((_FIRST_ROWS, _WORDS), dtype=np.uint64)
        self._used = 0
        self._written = 0  # rows of it that have pages: what is handed over keeps them all

    def __len__(self) -> int:
        return self._used

    def append(self, rows: Words) -> None:
        """Copy *rows*, of shape (n, 8), to the end."""
        end = self._used + len(rows)
        if end > len(self._rows):
            # Pages of the new array that are never written are never made.
            grown: Words = np.empty((max(len(self._rows) * 3 // 2, end), _WORDS), dtype=np.uint64)
            grown[: self._used] = self._rows[: self._used]
            self._rows, self._written = grown, 0
        self._rows[self._used : end] = rows
        self._used = end
        self._written = max(self._written, end)

    def take(self) -> Events:
        """Return everything as one EVENT array, by time (equal times in the order taken), and begin anew."""
        rows = self._rows[: self._used]
        if not self._used:
            return np.empty(0, dtype=EVENT)
        times = rows[:, 1]
        if (times[1:] < times[:-1]).any():
            # timsort: linear on a few sorted runs. The copy leaves the buffer to be used again.
            rows = rows.take(np.argsort(times, kind="stable"), axis=0)
        elif 2 * self._used < self._written:
            # A few after many that were copied: who keeps these for a minute must not keep the room of those.
            rows = rows.copy()
        else:
            # As large as this one and a quarter: a steady flow does not outgrow it.
            self._rows = np.empty((max(_FIRST_ROWS, self._used * 5 // 4), _WORDS), dtype=np.uint64)
            self._written = 0
        self._used = 0
        events: Events = rows.view(_RECORD).reshape(-1)["event"]
        return events


class EventRing:
    """A ring of fixed-size records, seen as rows of eight 64-bit words."""

    def __init__(self, fd: int, size: int) -> None:
        self._ring = _Mapping(fd, size)
        self._rows = self._ring.data.reshape(-1, _WORDS)

    def drain(self, into: RowBuffer) -> None:
        """Take all complete records, in ring order.

        Stops at a record still being written, and leaves out discarded ones.
        """
        consumed = int(self._ring.consumer[0])
        end = int(self._ring.producer[0])
        while consumed < end:
            first = (consumed % self._ring.size) // RECORD_BYTES
            count = min((end - consumed) // RECORD_BYTES, _PIECE_ROWS)
            rows = self._rows[first : first + count]
            # The headers first: one copy of everything may read the end of a record before its busy bit.
            flags = rows[:, 0] & (_BUSY | _DISCARD)
            if flags.any():
                busy = (flags & _BUSY) != 0
                if busy.any():
                    count = int(busy.argmax())
                    end = consumed + count * RECORD_BYTES
                rows = rows[:count][flags[:count] == 0]
            into.append(rows)
            consumed += count * RECORD_BYTES
            self._ring.consumer[0] = consumed

    @property
    def waiting_at(self) -> int | None:
        """Where the first record lies that has not been taken, in bytes since the start; None when there is none."""
        consumed = int(self._ring.consumer[0])
        return consumed if consumed < int(self._ring.producer[0]) else None

    def close(self) -> None:
        """Unmap and close the ring."""
        del self._rows
        self._ring.close()


class BlobRing:
    """The ring of variable-length records; few, so one bytes object each."""

    def __init__(self, fd: int, size: int) -> None:
        self._ring = _Mapping(fd, size)
        self._bytes = self._ring.data.view(np.uint8)

    def drain(self, limit: int = 20_000) -> list[bytes]:
        """Take up to *limit* complete records, oldest first."""
        out: list[bytes] = []
        position, end = int(self._ring.consumer[0]), int(self._ring.producer[0])
        while position < end and len(out) < limit:
            at = position % self._ring.size
            (header,) = struct.unpack("<I", self._bytes[at : at + 4].tobytes())
            if header & _BUSY:
                break
            length = header & ~(_BUSY | _DISCARD)
            if not header & _DISCARD:
                out.append(self._bytes[at + _HEADER_BYTES : at + _HEADER_BYTES + length].tobytes())
            position += (length + _HEADER_BYTES + 7) & ~7
        self._ring.consumer[0] = position
        return out

    def close(self) -> None:
        """Unmap and close the ring."""
        del self._bytes
        self._ring.close()


class DropCounters:
    """The per-kind, per-CPU counters of records that found their ring full."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lib = fd, libbpf()
        self._cpus = check(self._lib.libbpf_num_possible_cpus(), "possible CPUs")
        self._values = (ct.c_uint64 * self._cpus)()

    def read(self, kind: int) -> list[int]:
        """Return the count of one kind for each possible CPU, since the start."""
        key = ct.c_uint32(kind)
        check(self._lib.bpf_map_lookup_elem(self._fd, ct.byref(key), self._values), "drop counters")
        return list(self._values)
