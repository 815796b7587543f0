"""What an ELF file of a watched process is: architecture, static or not, C library, TLS, Python. Bounded reads.

The file is anybody's: what cannot be understood is left out.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple

from whyspan_probes import python_gc, sockets, symbols, usdt
from whyspan_probes.libraries import Bounded, Library

_MAX_HEADERS: Final = 256 << 10
_MAX_LIBC: Final = 8 << 20  # glibc 2.36 has 1.9 MB, its debug build more
#: Of glibc's own banner, and of musl's, which its loader prints.
_GLIBC: Final = re.compile(rb"GNU C Library[^\n]{0,80}version (\d+\.\d+)")
_MUSL: Final = re.compile(rb"\0(1\.\d{1,2}\.\d{1,3})\0")
_MACHINES: Final = {
    "EM_X86_64": "x86_64",
    "EM_AARCH64": "aarch64",
    "EM_386": "32-bit x86",
    "EM_ARM": "32-bit arm",
}

_TLS_HOOK: Final = next(h for h in sockets.PROBE.user_hooks if h.name == "tls")
_GC_NOTES: Final = frozenset(n for h in python_gc.PROBE.user_hooks for n in h.notes)
_GC_NAMES: Final = frozenset(n for h in python_gc.PROBE.user_hooks for n in h.symbols)
_GC_OWNER: Final = next(h.defines for h in python_gc.PROBE.user_hooks if h.defines)
_TLS_FILE: Final = re.compile(_TLS_HOOK.library)
_PYTHON_FILE: Final = re.compile(python_gc.PROBE.user_hooks[0].library)
_PYTHON_VERSION: Final = re.compile(r"python(\d\.\d+)")


class Program(NamedTuple):
    """The program that a process runs; ``machine`` empty: it could not be read."""

    machine: str
    static: bool
    go: bool


class Python(NamedTuple):
    """The file with CPython in it, and how its collections can be seen: notes, symbols, or "" for not at all."""

    version: str
    collections: str


def _open(library: Library) -> int:
    return os.open(library.open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def program(library: Library) -> Program:
    """Read the headers of a program."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.segments import NoteSegment

    try:
        with open(_open(library), "rb", buffering=0) as f:
            bounded: Any = Bounded(f, _MAX_HEADERS)
            elf: Any = ELFFile(bounded)
            segments = list(elf.iter_segments())
            kinds = {s["p_type"] for s in segments}
            notes = [n for s in segments if isinstance(s, NoteSegment) for n in s.iter_notes()]
            machine = str(elf["e_machine"])
            return Program(
                _MACHINES.get(machine, machine.removeprefix("EM_")),
                "PT_INTERP" not in kinds,
                any(n["n_name"] == "Go" for n in notes),
            )
    except Exception:  # hostile bytes raise whatever the parser did not think of
        return Program("", False, False)


def libc(library: Library) -> str:
    """Return name and version of a C library, such as ``glibc 2.36``; of another only the file's name."""
    is_musl = "musl" in library.name
    try:
        with open(_open(library), "rb") as f:
            data = f.read(_MAX_LIBC)
    except OSError:
        data = b""
    found = (_MUSL if is_musl else _GLIBC).search(data)
    name = "musl" if is_musl else "glibc" if found else library.name
    return f"{name} {found[1].decode()}" if found else name


def is_tls(library: Library) -> bool:
    """Whether the file has OpenSSL's functions, or those of what keeps its interface."""
    return bool(_TLS_FILE.search(library.path)) and bool(_symbols(library, _TLS_HOOK.symbols))


def python(library: Library) -> Python | None:
    """Return what is known of a file that may have CPython in it; None when it has not."""
    if not _PYTHON_FILE.search(library.path):
        return None
    found = _symbols(library, {_GC_OWNER, *_GC_NAMES})
    if _GC_OWNER not in found:
        return None
    version = _PYTHON_VERSION.search(library.name)
    way = "notes" if _has_notes(library) else "symbols" if found & _GC_NAMES else ""
    return Python(version[1] if version else "", way)


def _symbols(library: Library, names: Any) -> set[str]:
    try:
        fd = _open(library)
    except OSError:
        return set()
    try:
        return set(symbols.find(fd, names))
    except (symbols.ElfError, OSError):
        return set()
    finally:
        os.close(fd)


def _has_notes(library: Library) -> bool:
    try:
        fd = _open(library)
    except OSError:
        return False
    try:
        return bool(usdt.find(fd, _GC_NOTES))
    except OSError:
        return False
    finally:
        os.close(fd)
