"""Where the symbols of an ELF file lie in it, read from a file that anybody may have made.

Only what is needed, and bounded: headers and two kinds of tables as numpy arrays, no walk over names. libllama's
5,000 symbols take 1 ms; libtorch_cpu's 250,000 some 30 ms.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

_MAX_TABLE = 64 << 20
_MAX_HEADERS = 4096
_MACHINES = {"x86_64": 62, "aarch64": 183}  # elf.h: EM_X86_64, EM_AARCH64
_PT_LOAD, _SHT_SYMTAB, _SHT_DYNSYM = 1, 2, 11
_STT_OBJECT, _STT_FUNC = 1, 2

_SEGMENT = np.dtype("u4,u4,u8,u8,u8,u8,u8,u8")
_SEGMENT.names = ("type", "flags", "offset", "vaddr", "paddr", "filesz", "memsz", "align")
_SECTION = np.dtype("u4,u4,u8,u8,u8,u8,u4,u4,u8,u8")
_SECTION.names = ("name", "type", "flags", "addr", "offset", "size", "link", "info", "align", "entsize")
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


class ElfError(ValueError):
    """The file is not one whose symbols can be read; the message says why."""


class Symbol(NamedTuple):
    """``offset`` is where it lies in the file: what the kernel wants for a uprobe and for a semaphore."""

    offset: int
    size: int
    function: bool


def _read(fd: int, size: int, offset: int) -> bytes:
    if size > _MAX_TABLE:
        raise ElfError("a table of it is too large")
    if offset >= 1 << 62:
        raise ElfError("it is cut off")
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise ElfError("it is cut off")
    return data


def _table(fd: int, dtype: np.dtype[Any], offset: int, entry: int, count: int) -> np.ndarray[Any, Any]:
    if count and entry != dtype.itemsize:
        raise ElfError("its headers have an unknown size")
    if count > _MAX_HEADERS:
        raise ElfError("it has too many headers")
    return np.frombuffer(_read(fd, count * dtype.itemsize, offset), dtype)


class _Tables(NamedTuple):
    loads: list[Any]  # (offset, address, size in the file) of each loaded segment
    sections: np.ndarray[Any, Any]

    def symbols(self, kind: int) -> Iterator[tuple[Any, Any]]:
        """Yield (symbol table, its string table)."""
        for section in self.sections[self.sections["type"] == kind]:
            if int(section["link"]) < len(self.sections):
                yield section, self.sections[int(section["link"])]


def find(fd: int, names: Iterable[str], machine: str = platform.machine()) -> dict[str, Symbol]:
    """Return those of the names that the file defines, from ``.dynsym`` or else ``.symtab``.

    Left out: what has no bytes in the file (.bss), and indirect functions, whose symbol is that of their resolver.

    Raises:
        ElfError: not a 64-bit little-endian ELF file of this machine, or damaged.
        OSError: it cannot be read.
    """
    tables = _tables(fd, machine)
    wanted = list(dict.fromkeys(names))
    found: dict[str, Symbol] = {}
    for kind in (_SHT_DYNSYM, _SHT_SYMTAB):
        for section, strings in tables.symbols(kind):
            missing = [n for n in wanted if n not in found]
            if missing:
                found.update(_look(fd, section, strings, missing, tables.loads))
    return found


def named(fd: int, names: Iterable[str], machine: str = platform.machine()) -> set[str]:
    """Return those of the names that the file's dynamic symbols have, whether it defines or only uses them.

    One too many is possible: a name that is the tail of a longer one.

    Raises:
        ElfError: as ``find``.
        OSError: it cannot be read.
    """
    found: set[str] = set()
    for _, strings in _tables(fd, machine).symbols(_SHT_DYNSYM):
        text = _read(fd, int(strings["size"]), int(strings["offset"]))
        found |= {n for n in names if n.encode() + b"\0" in text}
    return found


def loads(fd: int, machine: str = platform.machine()) -> list[tuple[int, int, int]]:
    """Return (offset, address, size in the file) of each segment that is loaded.

    Raises:
        ElfError: as ``find``.
        OSError: it cannot be read.
    """
    return [(o, a, n) for o, a, n in _tables(fd, machine).loads]


def _tables(fd: int, machine: str) -> _Tables:
    header = _read(fd, 64, 0)
    if header[:6] != b"\x7fELF\x02\x01":
        raise ElfError("not a 64-bit ELF file")
    if struct.unpack_from("<H", header, 18)[0] != _MACHINES.get(machine):
        raise ElfError("an ELF file of another architecture")
    phoff, shoff = struct.unpack_from("<QQ", header, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", header, 54)
    segments = _table(fd, _SEGMENT, phoff, phentsize, phnum)
    loads = [
        tuple(map(int, row)) for row in segments[segments["type"] == _PT_LOAD][["offset", "vaddr", "filesz"]]
    ]
    sections = _table(fd, _SECTION, shoff, shentsize, shnum)
    return _Tables(loads, sections)


def _look(fd: int, section: Any, strings: Any, names: list[str], loads: list[Any]) -> dict[str, Symbol]:
    text = _read(fd, int(strings["size"]), int(strings["offset"]))
    size = int(section["size"]) // _SYMBOL.itemsize * _SYMBOL.itemsize
    symbols = np.frombuffer(_read(fd, size, int(section["offset"])), _SYMBOL)
    found: dict[str, Symbol] = {}
    for name in names:
        # A name may be the tail of a longer one: linkers merge them.
        raw, at = name.encode() + b"\0", -1
        places: list[int] = []
        while (at := text.find(raw, at + 1)) >= 0 and len(places) < _MAX_HEADERS:
            places.append(at)
        if not places:
            continue
        for symbol in symbols[np.isin(symbols["name"], places)]:
            kind, address = int(symbol["info"]) & 0xF, int(symbol["value"])
            if not symbol["section"] or kind not in (_STT_OBJECT, _STT_FUNC):
                continue
            for offset, vaddr, filesz in loads:
                if vaddr <= address < vaddr + filesz:
                    found[name] = Symbol(address - vaddr + offset, int(symbol["size"]), kind == _STT_FUNC)
    return found
