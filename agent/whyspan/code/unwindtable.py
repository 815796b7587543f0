"""Where the functions of a file begin, also of a stripped one: the table for unwinding says it."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from typing import Final

_PT_GNU_EH_FRAME: Final = 0x6474E550
_MAX_TABLE: Final = 64 << 20
_SEGMENT: Final = struct.Struct("<I4xQQQQ")  # kind, offset, address, physical address, bytes


def function_starts(fd: int) -> Sequence[int]:
    """Return the addresses at which functions begin, as the table for unwinding has them: also of a stripped file.

    The table is .eh_frame_hdr as every linker writes it: LSB 5.0, 10.6.2; in another form it is left out. Raises
    OSError or OverflowError when it is said to be where nothing can be.
    """
    head = os.pread(fd, 64, 0)
    if len(head) < 64 or head[4:6] != b"\x02\x01":  # 64 bits, little-endian
        return ()
    (at,), (size, count) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
    for i in range(min(count, 256)):
        entry = os.pread(fd, _SEGMENT.size, at + i * size)
        if len(entry) < _SEGMENT.size:
            return ()
        kind, offset, address, _, length = _SEGMENT.unpack(entry)
        if kind != _PT_GNU_EH_FRAME or length < 12 or length > _MAX_TABLE:
            continue
        table = os.pread(fd, length, offset)
        # Version 1; a pointer and a count of 4 bytes; pairs of 4 bytes each, from the table's beginning.
        if len(table) < 12 or table[:4] != b"\x01\x1b\x03\x3b":
            return ()
        (pairs,) = struct.unpack_from("<I", table, 8)
        values = array("i")
        values.frombytes(table[12 : 12 + 8 * min(pairs, (len(table) - 12) // 8)])
        return sorted(address + value for value in values[::2])
    return ()
