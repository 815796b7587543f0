"""The allocators of a process: which of the files that it maps define malloc and its like, and where.

Every file that does is hooked: which one serves the process is seen by whose functions are called. A preloaded
jemalloc leaves that of libc without a call.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from whyspan_probes import libraries, symbols
from whyspan_probes.libraries import Library, State

_PROC = Path("/proc")
_ANY: Final = re.compile("")
_MAX_ALLOCATORS = 8
_MAX_FILES = 1024


class Size(StrEnum):
    """Where a function's size is, as ``enum malloc_size`` of the object names it."""

    NONE = "SIZE_none"
    FIRST = "SIZE_first"
    SECOND = "SIZE_second"
    THIRD = "SIZE_third"
    PRODUCT = "SIZE_product"


_NAMES = {
    "malloc": Size.FIRST,
    "calloc": Size.PRODUCT,
    "realloc": Size.SECOND,
    "free": Size.NONE,
    "posix_memalign": Size.THIRD,
    "aligned_alloc": Size.SECOND,
    "memalign": Size.SECOND,
    "valloc": Size.FIRST,
    "mallocx": Size.FIRST,  # jemalloc's own
    "rallocx": Size.SECOND,
    "dallocx": Size.NONE,
    "sdallocx": Size.NONE,
}
#: Of allocators that are linked in under names of their own: jemalloc's default off Linux, Rust's, tcmalloc's,
#: mimalloc's.
_PREFIXES = ("", "je_", "_rjem_", "tc_", "mi_")
#: operator new and delete, where the allocator has its own that do not go through malloc.
_OPERATORS = {
    "_Znwm": ("operator new", Size.FIRST),
    "_Znam": ("operator new[]", Size.FIRST),
    "_ZnwmRKSt9nothrow_t": ("operator new", Size.FIRST),
    "_ZnamRKSt9nothrow_t": ("operator new[]", Size.FIRST),
    "_ZnwmSt11align_val_t": ("operator new", Size.FIRST),
    "_ZnamSt11align_val_t": ("operator new[]", Size.FIRST),
    "_ZdlPv": ("operator delete", Size.NONE),
    "_ZdaPv": ("operator delete[]", Size.NONE),
    "_ZdlPvm": ("operator delete", Size.NONE),
    "_ZdaPvm": ("operator delete[]", Size.NONE),
}
_MARKS = {
    "mallctl": "jemalloc",
    "je_mallctl": "jemalloc",
    "_rjem_mallctl": "jemalloc",
    "tc_version": "tcmalloc",
    "tc_malloc": "tcmalloc",
    "mi_version": "mimalloc",
    "gnu_get_libc_version": "glibc",
}


class Function(NamedTuple):
    """A function to hook.

    ``throws``: a C++ exception may leave it, so that its return is hooked only after a check. ``stepped``: its first
    instruction has to be stepped over by the kernel, which makes a hook on it dearer.
    """

    name: str
    symbol: str
    offset: int
    size: Size
    throws: bool = False
    stepped: bool = False


class Allocator(NamedTuple):
    """A file with an allocator in it; ``open_path`` opens it while the process lives."""

    name: str
    path: str
    open_path: str
    functions: tuple[Function, ...]


class Found(NamedTuple):
    """The allocators of a process, and what could not be looked into or may be missing."""

    allocators: tuple[Allocator, ...]
    notes: tuple[str, ...]


def find(tgid: int, proc: Path = _PROC) -> Found:
    """Look through the code that a process maps, the program itself first."""
    maps = libraries.mapped(tgid, proc)
    if maps.state is not State.OK:
        return Found((), (maps.state.value,))
    program = libraries.executable(tgid, proc)
    notes: list[str] = []
    allocators: list[Allocator] = []
    seen: set[tuple[int, int]] = set()
    for file in _code(tgid, program, maps, proc):
        if file.state is not State.OK:
            notes.append(f"{file.path}: {file.state.value}")
            continue
        if (file.device, file.inode) in seen:
            continue
        seen.add((file.device, file.inode))
        shared = (file.device, file.inode) != (program.device, program.inode)
        try:
            found = _functions(file, shared)
        except OSError as e:
            notes.append(f"{file.path}: {e.strerror}")
        except symbols.ElfError as e:
            if not shared or ".so" in file.name:
                notes.append(f"{file.path}: {e}")
        else:
            if found is not None:
                allocators.append(found)
    if not allocators:
        notes.append(
            "no file that it maps names a malloc: an allocator linked into a stripped program cannot be found"
        )
    return Found(tuple(allocators[:_MAX_ALLOCATORS]), tuple(notes[:16]))


def _code(tgid: int, program: Library, maps: libraries.Maps, proc: Path) -> list[Library]:
    code = tuple(f for f in maps.files if f.executable and f.path != program.path)[:_MAX_FILES]
    return [program, *libraries.find(tgid, _ANY, proc, libraries.Maps(code, State.OK))]


def _functions(file: Library, shared: bool) -> Allocator | None:
    names = {p + n: (p + n, size) for p in _PREFIXES for n, size in _NAMES.items()}
    fd = os.open(file.open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = symbols.find(fd, [*names, *_OPERATORS, *_MARKS])
        first = {
            f.offset: os.pread(fd, 2, f.offset) for n, f in found.items() if n in names or n in _OPERATORS
        }
    finally:
        os.close(fd)
    if not any(p + "malloc" in found and p + "free" in found for p in _PREFIXES):
        return None
    kind = next((kind for mark, kind in _MARKS.items() if mark in found), "")
    wanted = [(symbol, name, size, False) for symbol, (name, size) in names.items()]
    # In a program, or beside libc's malloc, they are libstdc++'s and go on to malloc: counted there.
    if shared and kind not in ("", "glibc"):
        wanted += [(s, name, size, size is not Size.NONE) for s, (name, size) in _OPERATORS.items()]
    functions: dict[int, Function] = {}
    for symbol, name, size, throws in wanted:
        place = found.get(symbol)
        if place is not None and place.function:
            # Two names of one function: once.
            functions.setdefault(
                place.offset,
                Function(name, symbol, place.offset, size, throws, is_stepped(first[place.offset])),
            )
    return Allocator(kind or file.name, file.path, file.open_path, tuple(functions.values()))


def is_stepped(code: bytes) -> bool:
    """Whether the kernel steps over the instruction at a function's entry, rather than emulating it; x86-64.

    It emulates push, nop, jumps and calls: arch/x86/kernel/uprobes.c, ``branch_setup_ops`` and ``push_setup_ops``.
    """
    if len(code) < 2:
        return True
    byte = code[1] if code[0] == 0x41 else code[0]  # REX.B push
    if 0x50 <= byte <= 0x57:
        return False
    if code[0] == 0x0F:
        return not 0x80 <= code[1] <= 0x8F
    return not (code[0] in (0x90, 0xE8, 0xE9, 0xEB) or 0x70 <= code[0] <= 0x7F)
