"""Addresses of stacks: which of them can be true, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from whyspan.code import maps, symbolise
from whyspan.code.asked import Module, Question
from whyspan.code.files import identify
from whyspan.code.maps import Mapping
from whyspan.code.names import Names as Ranges
from whyspan.text import clean

_PROC: Final = Path("/proc")
_MAX_ADDRESSES: Final = 8192
_MODULE_CHARS: Final = 80
_VDSO: Final = "[vdso]"


_Key = tuple[int, str]  # inode and path


class _Place(NamedTuple):
    """``offset`` is in the file or the vdso; of code that the process made (no ``key``), the address."""

    mapping: Mapping
    key: _Key | None
    offset: int


class Code:
    """The code that a process maps; empty when it has ended."""

    def __init__(self, tgid: int, proc: Path = _PROC) -> None:
        self.tgid = tgid
        self.maps = maps.read(tgid, proc) or maps.Maps()

    def holds(self, address: int) -> bool:
        """Whether there is code at the address."""
        return self.maps.at(address) is not None

    def true_part(self, frames: Iterable[int]) -> list[int]:
        """Return the frames up to the first that cannot be one.

        A walk over frame pointers goes astray in code that has none: what it finds then is mostly no code at all.
        """
        out = []
        for address in frames:
            if not self.holds(address):
                break
            out.append(address)
        return out


def of_call(caller: int, frames: Sequence[int]) -> list[int]:
    """Return the stack below a function that was just entered.

    The first frame is the function itself. Its caller is not among those that frame pointers lead to (nor is, of a
    library without, the one above); some kernels (6.11) have it all the same.
    """
    rest = list(frames[1:])
    if rest and rest[0] == caller:
        rest = rest[1:]
    return [caller, *rest] if caller else rest


class Names(NamedTuple):
    """What addresses and numbers are called; ``by``: bcc, maps (module and offset only), or why there are none."""

    user: dict[int, str]
    kernel: dict[int, str]
    syscalls: dict[int, str]
    by: str

    def stack(self, frames: Iterable[int]) -> list[str]:
        """Return the names of a program's frames."""
        return [self.user.get(a, f"0x{a:x}") for a in frames]


def name(
    tgid: int,
    code: Code,
    user: Iterable[int],
    *,
    kernel: Iterable[int] = (),
    syscalls: Iterable[int] = (),
    command: Sequence[str] = symbolise.COMMAND,
) -> Names:
    """Ask for names; what has none is named by its module and offset. *command* is for tests."""
    places = {a: _place(code, a) for a in list(dict.fromkeys(user))[:_MAX_ADDRESSES]}
    modules: dict[_Key, Module] = {}
    made: list[int] = []
    for place in places.values():
        if place is None:
            continue
        if place.key is None:
            made.append(place.offset)
            continue
        if place.key not in modules:
            modules[place.key] = _module(tgid, place.mapping)
        modules[place.key].offsets.append(place.offset)
    question = Question(
        modules=list(modules.values()),
        made=[(tgid, made)] if made else [],
        kernel=list(dict.fromkeys(kernel))[:_MAX_ADDRESSES],
        syscalls=list(dict.fromkeys(syscalls))[:1024],
    )
    answer = symbolise.ask(question, command)
    found = Ranges()
    for number, key in enumerate(modules):
        for one in answer.modules.get(number, ()):
            found.put(key, one)
    for one in answer.made.get(tgid, ()):
        found.put(None, one)
    names: dict[int, str] = {}
    for address, place in places.items():
        if place is not None:
            function = found.get(place.key, place.offset)
            module, at = clean(place.mapping.name, _MODULE_CHARS), place.mapping
            offset = address - at.start + at.offset
            names[address] = symbolise.text(function, module) if function else f"{module}+0x{offset:x}"
    by = answer.by or f"none: {answer.why}"
    if answer.by and not answer.whole:
        by = f"{answer.by}, in part: {answer.why}"
    return Names(names, answer.kernel, answer.syscalls, by)


def _place(code: Code, address: int) -> _Place | None:
    at = address - 1  # an address to return to may be the first of the next function
    mapping = code.maps.at(at)
    if mapping is None:
        return None
    if mapping.of_file or mapping.path == _VDSO:
        return _Place(mapping, (mapping.inode, mapping.path), at - mapping.start + mapping.offset)
    return _Place(mapping, None, at)


def _module(tgid: int, mapping: Mapping) -> Module:
    return Module(
        path=mapping.path.encode(errors="replace").decode(),
        holders=[(tgid, mapping.span)],
        id=identify(f"/proc/{tgid}/map_files/{mapping.span}"),
        inode=mapping.inode,
        vdso=mapping.path == _VDSO,
    )


def waits_in(frames: Iterable[str]) -> str:
    """Return the function that a sleep was for: the first above the scheduler's own."""
    names = list(frames)
    last = max((i for i, n in enumerate(names) if "schedule" in n), default=-1)
    return names[last + 1] if last + 1 < len(names) else ""
