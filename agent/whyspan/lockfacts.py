"""What the addresses of a process's locks are: read from its mappings and the ELF files behind them, cached by file."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan_probes import libraries, symbols
from whyspan_probes.symbols import ElfError

from whyspan.model import LockFact, TextRange
from whyspan.text import clean

_PROC: Final = Path("/proc")
_MAX_MAPS_BYTES: Final = 4 << 20  # some 40,000 mappings
_MAX_FILES: Final = 256
_MAX_RANGES: Final = 512
_MAX_LOOKS: Final = 4  # processes read again per call: each takes some ms
_MAX_CODE: Final = 4096
_FIRST_S: Final = 0.5
_LONGEST_S: Final = 60.0

_LINE: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) (\S+) ([1-9]\d*) +(/[^\n]*)$", re.MULTILINE
)
_PYTHON: Final = re.compile(r"/(?:lib)?python(\d+\.\d+)[a-z]*(?:\.so[.\d]*)?$")
_LIBC: Final = re.compile(r"/libc(?:-[\d.]+)?\.so(?:\.6)?$")
#: ``lock cmpxchg %r32,disp(%rip)``: the opcode and a ModRM byte of that form. Source: Intel SDM, volume 2.
_LOCK_CMPXCHG: Final = re.compile(rb"\xf0\x0f\xb1[\x05\x0d\x15\x1d\x25\x2d\x35\x3d](....)", re.DOTALL)
#: Offset of ``gil`` in ``_PyRuntime`` and its size, where they were measured (x86-64). In other versions whatever
#: is waited for in ``_PyRuntime`` is taken for it: nothing else there is a futex. Source: environment.md.
_GIL: Final = {"3.11": (0x168, 208)}


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    executable: bool
    path: str
    identity: tuple[bytes, bytes]
    span: str


@dataclass(frozen=True)
class _File:
    """Offsets in a file, -1 where it has no such thing; ``note`` says what could not be had."""

    gil: int = -1
    gil_bytes: int = 0
    arena: int = -1
    note: str = ""


class LockFacts:
    """Follows the processes that are watched; a process is read again only when its code grew."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._files: OrderedDict[tuple[Any, ...], _File] = OrderedDict()
        self._seen: dict[
            int, tuple[str, float, float]
        ] = {}  # tgid: size of its code, when to look again, delay

    def again(self, tgid: int) -> None:
        """Look at the process at the next call: it executes another program."""
        self._seen.pop(tgid, None)

    def follow(self, tgids: Collection[int], now_s: float) -> list[LockFact]:
        """Return what is new of the processes that are due. *now_s* is CLOCK_MONOTONIC."""
        for tgid in self._seen.keys() - set(tgids):
            del self._seen[tgid]
        out: list[LockFact] = []
        looks = 0
        for tgid in tgids:
            code, due_s, delay_s = self._seen.get(tgid, ("", now_s, _FIRST_S))
            if now_s < due_s or looks == _MAX_LOOKS:
                continue
            now = libraries.code_size(tgid, self._proc)
            self._seen[tgid] = (now, now_s + delay_s, min(delay_s * 2, _LONGEST_S))
            if now and now != code:
                looks += 1
                out.append(self.read(tgid))
        return out

    def read(self, tgid: int) -> LockFact:
        """Return what the locks of a process are, as far as its files tell."""
        found = self._mappings(tgid)
        gil = arena = 0, 0
        notes: list[str] = []
        for m in found:
            wanted = _PYTHON.search(m.path) or _LIBC.search(m.path)
            if wanted is None or (gil[1] and arena[1]):
                continue
            file = self._file(tgid, m)
            if file.gil >= 0 and m.offset <= file.gil < m.offset + m.end - m.start:
                at = m.start + file.gil - m.offset
                gil = at, at + file.gil_bytes
            if file.arena >= 0 and m.offset <= file.arena < m.offset + m.end - m.start:
                at = m.start + file.arena - m.offset
                arena = at, at + 4
            if file.note:
                notes.append(file.note)
        text = [TextRange(m.start, m.end, clean(m.path, 160)) for m in found if m.executable]
        return LockFact(tgid, *gil, arena[0], text[:_MAX_RANGES], "; ".join(dict.fromkeys(notes)))

    def _mappings(self, tgid: int) -> list[_Mapping]:
        """Return the mappings of files, in order of address."""
        try:
            with (self._proc / str(tgid) / "maps").open("rb") as f:
                data = f.read(_MAX_MAPS_BYTES)
        except OSError:
            return []
        out = []
        for start, end, mode, offset, device, inode, raw in _LINE.findall(data):
            path = os.fsdecode(raw).removesuffix(" (deleted)")
            span = f"{start.decode()}-{end.decode()}"
            code = b"x" in mode
            out.append(
                _Mapping(int(start, 16), int(end, 16), int(offset, 16), code, path, (device, inode), span)
            )
        return out

    def _file(self, tgid: int, m: _Mapping) -> _File:
        """Open what is mapped, by its mapping or else by its path in the process's root, and read it once."""
        folder = self._proc / str(tgid)
        for path in (folder / "map_files" / m.span, Path(f"{folder}/root{m.path}")):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:
                continue
            try:
                info = os.fstat(fd)
                key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, m.path)
                file = self._files.get(key)
                if file is None:
                    file = self._files[key] = _examined(fd, m.path)
                    if len(self._files) > _MAX_FILES:
                        self._files.popitem(last=False)
                return file
            finally:
                os.close(fd)
        return _File(note=f"{clean(os.path.basename(m.path), 64)} cannot be read")


def _examined(fd: int, path: str) -> _File:
    python = _PYTHON.search(path)
    name = clean(os.path.basename(path), 64)
    try:
        if python is None:
            arena = _main_arena(fd)
            return _File(arena=arena, note="" if arena >= 0 else f"main_arena not found in {name}")
        runtime = symbols.find(fd, ["_PyRuntime"]).get("_PyRuntime")
        if runtime is None:
            # An executable that only starts libpython has none either: what is missing is said of the library.
            note = f"_PyRuntime not found in {name}" if ".so" in name else ""
            return _File(note=note)
        offset, size = _GIL.get(python[1], (0, runtime.size))
        return _File(gil=runtime.offset + offset, gil_bytes=size)
    except (ElfError, OSError, ValueError) as e:
        return _File(note=f"{name}: {clean(str(e), 80)}")


def _main_arena(fd: int) -> int:
    """Return where glibc's ``main_arena`` lies in its file, -1 when that is not found.

    In a stripped libc ``mallopt`` tells: the first thing it does is to take the arena's lock.
    """
    found = symbols.find(fd, ["main_arena", "mallopt"])
    if "main_arena" in found:
        return found["main_arena"].offset
    function = found.get("mallopt")
    if function is None:
        return -1
    code = os.pread(fd, min(function.size or _MAX_CODE, _MAX_CODE), function.offset)
    match = _LOCK_CMPXCHG.search(code)
    if match is None:
        return -1
    away = int.from_bytes(match[1], "little", signed=True)
    loads = symbols.loads(fd)
    text = next((s for s in loads if s[0] <= function.offset < s[0] + s[2]), None)
    if text is None:
        return -1
    address = function.offset - text[0] + text[1] + match.end() + away
    return next((address - a + o for o, a, size in loads if a <= address < a + size), -1)
