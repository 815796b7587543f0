"""Names code objects of CPython: file, function and line table, read once while they are there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from whyspan.code import memory
from whyspan.code.layouts import Layout
from whyspan.code.linetable import line_of
from whyspan.text import clean

_CODE_BYTES: Final = 152  # what the kernel's walker reads, too: python.bpf.h
_STRING_BYTES: Final = 72  # the head of any string (3.11: sizeof(PyCompactUnicodeObject))
_BYTES_HEAD: Final = 32  # offsetof(PyBytesObject, ob_sval)
_MAX_CHARS: Final = 240
_MAX_TABLE: Final = memory.MAX_READ
_CACHED: Final = 20_000
_MAX_PLACES: Final = 64
_M32: Final = 0xFFFFFFFF


class Code:
    """A code object as it was read; ``check`` is what the kernel's walker computes of it."""

    __slots__ = ("_lines", "check", "file", "first_line", "function", "table")

    def __init__(self, check: int, function: str, file: str, first_line: int, table: bytes) -> None:
        self.check, self.function, self.file, self.first_line, self.table = (
            check,
            function,
            file,
            first_line,
            table,
        )
        self._lines: dict[int, int] = {}

    def line(self, at: int) -> int:
        """Return the line of the instruction at this offset, in bytes; 0 not known."""
        if at >= 1 << 31:  # a frame that has not begun has its place before the first instruction
            return self.first_line
        known = self._lines.get(at)
        if known is None:  # a pass over the table is dear, and threads are seen at few places
            if len(self._lines) >= _MAX_PLACES:
                self._lines.clear()
            known = self._lines[at] = line_of(self.table, self.first_line, at)
        return known


def check_of(name: int, name_hash: int, filename: int, table: int, line: int) -> int:
    """Return the check of a code object, as ``whyspan_walk_on`` of python.bpf.h computes it."""
    mixed = (name_hash ^ name ^ (filename << 1) ^ (table << 2) ^ (line << 32)) & (1 << 64) - 1
    return (mixed ^ mixed >> 32) & _M32


class CodeObjects:
    """Names by process and address. What was another object when it was seen gets no name."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], Code] = OrderedDict()
        self.stale = 0  # seen, and another object by the time that it was read

    def forget(self, tgid: int) -> None:
        """Drop what is known of a process: it has ended, or executes another program."""
        for key in [k for k in self._known if k[0] == tgid]:
            del self._known[key]

    def resolve(
        self, tgid: int, layout: Layout, frames: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, int], Code]:
        """Return the code objects of frames given as (address, check); those without a name are left out."""
        out: dict[tuple[int, int], Code] = {}
        missing: list[tuple[int, int]] = []
        for address, check in dict.fromkeys(frames):
            known = self._known.get((tgid, address))
            if known is not None and known.check == check:
                self._known.move_to_end((tgid, address))
                out[address, check] = known
            else:
                missing.append((address, check))
        if not missing:
            return out
        read = _read(tgid, layout, list(dict.fromkeys(a for a, _ in missing)))
        for address, check in missing:
            code = read.get(address)
            if code is None or code.check != check:
                self.stale += 1
                continue
            out[address, check] = self._known[tgid, address] = code
        while len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return out


class _Fields(NamedTuple):
    name: int
    qualname: int
    filename: int
    table: int
    line: int


def _read(tgid: int, layout: Layout, addresses: list[int]) -> dict[int, Code]:
    heads = memory.read(tgid, [(a, _CODE_BYTES) for a in addresses])
    fields = {a: _fields(head, layout) for a, head in zip(addresses, heads, strict=True) if head}
    # Each string is read head first, then as long as it says.
    pieces: list[tuple[int, int]] = []
    for f in fields.values():
        pieces += [(address, _STRING_BYTES) for address in (f.name, f.qualname, f.filename)]
        pieces.append((f.table, _BYTES_HEAD))
    first = memory.read(tgid, pieces)
    second: list[tuple[int, int]] = []
    plans: dict[int, tuple[int, list[tuple[int, int, str]]]] = {}
    for n, (address, f) in enumerate(fields.items()):
        name, qualname, filename, table = first[4 * n : 4 * n + 4]
        if not (name and qualname and filename and table):
            continue
        texts = [_text_at(f.qualname, qualname, layout), _text_at(f.filename, filename, layout)]
        size = int.from_bytes(table[16:24], "little")
        if not 0 < size <= _MAX_TABLE:
            size = 0
        hashed = int.from_bytes(name[layout.name_hash : layout.name_hash + 8], "little")
        plans[address] = (hashed, [*texts, (f.table + _BYTES_HEAD, size, "")])
    for _, places in plans.values():
        second += [(a, n) for a, n, _ in places]
    bodies = memory.read(tgid, second)
    out: dict[int, Code] = {}
    for n, (address, (hashed, places)) in enumerate(plans.items()):
        f = fields[address]
        qualname, filename, table = bodies[3 * n : 3 * n + 3]
        check = check_of(f.name, hashed, f.filename, f.table, f.line)
        out[address] = Code(
            check, _decode(qualname, places[0][2]), _decode(filename, places[1][2]), f.line, table
        )
    return out


def _fields(head: bytes, layout: Layout) -> _Fields:
    def word(at: int, size: int = 8) -> int:
        return int.from_bytes(head[at : at + size], "little")

    return _Fields(
        word(layout.code_name),
        word(layout.qualname),
        word(layout.code_filename),
        word(layout.code_table),
        word(layout.code_line, 4),
    )


def _text_at(address: int, head: bytes, layout: Layout) -> tuple[int, int, str]:
    """Return (address, bytes, encoding) of a string's characters, cut to what is kept."""
    length = min(int.from_bytes(head[16:24], "little"), _MAX_CHARS + 1)  # one more shows that it was cut
    state = int.from_bytes(head[32:36], "little")
    # "interned" comes before "kind", which is never 0; it has 2 bits, or 16 in some builds of 3.14 (unicodeobject.h).
    state >>= 2 if state & 0xFFFC else 16
    kind, compact, ascii_only = state & 7, state >> 3 & 1, state >> 4 & 1
    encoding = {1: "ascii" if ascii_only else "latin-1", 2: "utf-16-le", 4: "utf-32-le"}.get(kind, "")
    if not encoding or not compact or not length:
        return address, 0, ""
    return address + (layout.ascii_text if ascii_only else layout.other_text), length * kind, encoding


def _decode(data: bytes, encoding: str) -> str:
    return clean(data.decode(encoding, errors="replace"), _MAX_CHARS) if encoding else ""
