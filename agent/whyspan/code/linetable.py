"""Reads the line of an instruction from a code object's location table (CPython 3.11 and later)."""

from __future__ import annotations

# Kinds of entries, Include/cpython/code.h: _PyCodeLocationInfoKind. Below 10 the columns are in short form.
_ONE_LINE, _NO_COLUMNS, _LONG, _NONE = 10, 13, 14, 15
_MAX_SHIFT = 35


def line_of(table: bytes, first_line: int, at: int) -> int:
    """Return the line of the instruction *at* so many bytes from the start; 0 when the table does not say.

    The format is that of Objects/locations.md. The table may have been written by anybody: whatever is in it, the
    answer is a number and comes after at most one pass.
    """
    line, address, i = first_line, 0, 0
    while i < len(table):
        head = table[i]
        i += 1
        if not head & 0x80:
            return 0
        kind = head >> 3 & 15
        end = address + 2 * ((head & 7) + 1)
        here = line
        if kind == _NONE:
            here = 0
        elif kind in (_LONG, _NO_COLUMNS):
            delta, i = _varint(table, i)
            line += -(delta >> 1) if delta & 1 else delta >> 1
            here = line
        elif kind >= _ONE_LINE:
            line += kind - _ONE_LINE
            here = line
        if address <= at < end:
            return here if 0 < here < 1 << 31 else 0
        address = end
        while (
            i < len(table) and not table[i] & 0x80
        ):  # columns: only the first byte of an entry has the top bit
            i += 1
    return 0


def _varint(table: bytes, i: int) -> tuple[int, int]:
    value = shift = 0
    while i < len(table) and shift <= _MAX_SHIFT:
        byte = table[i]
        i += 1
        value |= (byte & 63) << shift
        if not byte & 64:
            break
        shift += 6
    return value, i
