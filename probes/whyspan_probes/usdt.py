"""USDT notes of an ELF file: where a program says that it may be hooked, with which semaphore and arguments.

A note (section ``.note.stapsdt``, made by ``sys/sdt.h``) names an instruction that does nothing, a 16-bit counter that
whoever hooks it must raise (the program skips the place while it is zero), and says where the arguments lie then.
The file is anybody's: what is read of it is bounded, and what cannot be understood is left out.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from whyspan_probes.libraries import Bounded

#: Headers, names of sections, and notes; libpython's are 12 KiB in all.
_MAX_READ: Final = 256 << 10
_MAX_NOTES: Final = 512
_NT_STAPSDT: Final = 3
_CONSTANT, _REGISTER, _MEMORY = 1, 2, 3  # enum note_argument of usdt.bpf.h

#: Place of each register in the kernel's struct pt_regs (arch/x86/include/asm/ptrace.h), by its number of bytes.
_ORDER: Final = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi"
_PLACES: Final = {name: 8 * i for i, name in enumerate(_ORDER.split())} | {"rsp": 152}
_ARGUMENT: Final = re.compile(
    r"(?P<size>-?[1248])@(?:\$(?P<constant>-?\d+)|%(?P<register>\w+)|(?P<offset>-?\d*)\(%(?P<base>\w+)\))(?:\s|$)"
)


class Note(NamedTuple):
    """A place to hook. ``offset`` and ``semaphore`` (0: it has none) are offsets in the file."""

    name: str  # provider:name
    offset: int
    semaphore: int
    arguments: str


def find(fd: int, names: Collection[str]) -> list[Note]:
    """Return the notes of these names, each *provider:name*; a name may have several places.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(os.dup(fd), "rb", buffering=0) as f:
            return _find(Bounded(f, _MAX_READ), names)
    except OSError:
        raise
    except Exception:  # hostile bytes raise whatever the parser did not think of
        return []


def _find(file: Any, names: Collection[str]) -> list[Note]:
    from elftools.elf.elffile import ELFFile

    elf: Any = ELFFile(file)
    section = elf.get_section_by_name(".note.stapsdt")
    if section is None:
        return []
    base = elf.get_section_by_name(".stapsdt.base")
    found: list[Note] = []
    for i, note in enumerate(section.iter_notes()):
        if i >= _MAX_NOTES:
            break
        if note["n_name"] != "stapsdt" or note["n_type"] not in (_NT_STAPSDT, "NT_GNU_BUILD_ID"):
            continue
        data: bytes = note["n_descdata"]
        place, linked_base, semaphore = struct.unpack_from("<QQQ", data)
        provider, name, arguments = (t.decode("latin-1") for t in data[24:].split(b"\0")[:3])
        if f"{provider}:{name}" not in names:
            continue
        # Prelinked files were moved after the notes were written.
        moved = int(base["sh_addr"]) - linked_base if base is not None else 0
        at = _offset(elf, place + moved)
        counter = _offset(elf, semaphore + moved) if semaphore else 0
        if at:
            found.append(Note(f"{provider}:{name}", at, counter, arguments))
    return found


def _offset(elf: Any, address: int) -> int:
    return int(next(iter(elf.address_offsets(address, 1)), 0))


def argument(text: str, machine: str = platform.machine()) -> int:
    """Return where a note's first argument lies as bits 8-63 of a cookie, which usdt.bpf.h reads; 0 for none.

    Constants, registers, and memory at a distance from a register: what compilers make of a number. Of x86-64 only:
    on others it is not known where it lies, and the event is reported without it.
    """
    m = _ARGUMENT.match(text)
    if machine != "x86_64" or m is None:
        return 0
    size = int(m["size"])
    shape = abs(size) << 10 | (size < 0) << 14
    if m["constant"] is not None:
        return _CONSTANT << 8 | shape | (int(m["constant"]) & 0xFFFFFFFF) << 32
    register = _place(m["register"] or m["base"])
    if register is None:
        return 0
    if m["register"] is not None:
        return _REGISTER << 8 | shape | register << 16
    return _MEMORY << 8 | shape | register << 16 | (int(m["offset"] or 0) & 0xFFFFFFFF) << 32


def _place(name: str) -> int | None:
    """Where a register of any width lies in pt_regs: rax, eax, ax, al; r8, r8d, r8w, r8b; rsi, esi, si, sil."""
    if re.fullmatch(r"r\d+[dwb]", name):
        name = name[:-1]
    elif re.fullmatch(r"[abcd][lh]", name):
        name = f"r{name[0]}x" if name[1] == "l" else ""  # ah and its like are not the low byte
    elif re.fullmatch(r"(si|di|bp|sp)l", name):
        name = f"r{name[:2]}"
    elif len(name) == 2 and not name.startswith("r"):
        name = f"r{name}"
    elif name.startswith("e"):
        name = f"r{name[1:]}"
    return _PLACES.get(name)
