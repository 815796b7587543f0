"""Finds the interpreter in a process: where its state lies in memory, and how that is laid out."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from whyspan_probes import libraries, symbols
from whyspan_probes.libraries import State
from whyspan_probes.symbols import ElfError

from whyspan.code import memory
from whyspan.code.layouts import DEBUG_OFFSETS_BYTES, Layout, LayoutError, by_version, of_debug_offsets
from whyspan.text import clean

_PROC: Final = Path("/proc")
#: The program itself, or the library that it is only a launcher of.
_PYTHON: Final = re.compile(r"/(?:lib)?python3(?:\.\d+)?[a-z]*(?:\.so[.\d]*)?$")
_LINE: Final = re.compile(
    rb"^([0-9a-f]+)-[0-9a-f]+ .... ([0-9a-f]+) \S+ ([1-9]\d*) +(/[^\n]*)$", re.MULTILINE
)
_MAX_MAPS_BYTES: Final = 4 << 20
_FIRST_S, _LONGEST_S = 0.5, 60.0
_MAX_LOOKS: Final = 4


class Interpreter(NamedTuple):
    """``runtime`` is the address of ``_PyRuntime``. Without a layout, ``problem`` says why frames cannot be walked."""

    version: tuple[int, int]
    runtime: int
    layout: Layout | None
    problem: str = ""


def find(tgid: int, proc: Path = _PROC) -> Interpreter | None:
    """Return the interpreter of a process; None when it has none that was found. Costs some ms."""
    # A program may have the interpreter in itself, whatever it is called.
    candidates = [*libraries.find(tgid, _PYTHON, proc), libraries.executable(tgid, proc)]
    for library in candidates:
        if library.state is not State.OK:
            continue
        try:
            with open(library.open_path, "rb") as f:
                found = symbols.find(f.fileno(), ["_PyRuntime", "Py_Version"])
                loads = symbols.loads(f.fileno())
        except (ElfError, OSError, ValueError):
            continue
        if "_PyRuntime" not in found:
            continue
        base = _base(tgid, library.path, loads, proc)
        if base is None:
            continue
        runtime = base + _address(found["_PyRuntime"].offset, loads)
        version = 0
        if "Py_Version" in found:  # of 3.11 and later: PY_VERSION_HEX
            (data,) = memory.read(tgid, [(base + _address(found["Py_Version"].offset, loads), 8)])
            version = int.from_bytes(data, "little")
        return _examine(tgid, (version >> 24 & 0xFF, version >> 16 & 0xFF), runtime)
    return None


def _examine(tgid: int, version: tuple[int, int], runtime: int) -> Interpreter:
    layout = by_version(version)
    if layout is not None:
        return Interpreter(version, runtime, layout)
    (data,) = memory.read(tgid, [(runtime, DEBUG_OFFSETS_BYTES)])
    try:
        version, layout = of_debug_offsets(data)
    except LayoutError as e:
        name = f"CPython {version[0]}.{version[1]}" if version[0] else "an old CPython"
        return Interpreter(version, runtime, None, str(e) if str(e).startswith("CPython") else f"{name}: {e}")
    return Interpreter(version, runtime, layout)


def _address(offset: int, loads: list[tuple[int, int, int]]) -> int:
    """Return the address in the file's own view of what lies at an offset in it."""
    return next((offset - o + a for o, a, size in loads if o <= offset < o + size), offset)


def _base(tgid: int, path: str, loads: list[tuple[int, int, int]], proc: Path) -> int | None:
    """Return by how much the file's addresses are moved in the process."""
    try:
        with (proc / str(tgid) / "maps").open("rb") as f:
            data = f.read(_MAX_MAPS_BYTES)
    except OSError:
        return None
    for start, offset, _, raw in _LINE.findall(data):
        if raw.decode(errors="surrogateescape").removesuffix(" (deleted)") == path:
            at = int(offset, 16)
            # A mapping begins at a page; so does its segment, rounded down.
            for o, a, size in loads:
                if o & ~0xFFF <= at < o + size:
                    return int(start, 16) - (a - o + at)
    return None


class Interpreters:
    """Follows the processes that are watched; one is looked at again only when its code grew."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._seen: dict[int, tuple[str, float, float]] = {}
        self.found: dict[int, Interpreter] = {}

    def again(self, tgid: int) -> None:
        """Look at the process at the next call: it executes another program."""
        self._seen.pop(tgid, None)
        self.found.pop(tgid, None)

    def follow(self, tgids: Collection[int], now_s: float) -> dict[int, Interpreter]:
        """Return the interpreters that are new. *now_s* is CLOCK_MONOTONIC."""
        for tgid in self._seen.keys() - set(tgids):
            self.again(tgid)
        new: dict[int, Interpreter] = {}
        looks = 0
        for tgid in tgids:
            code, due_s, delay_s = self._seen.get(tgid, ("", now_s, _FIRST_S))
            if now_s < due_s or looks == _MAX_LOOKS or tgid in self.found:
                continue
            size = libraries.code_size(tgid, self._proc)
            self._seen[tgid] = (size, now_s + delay_s, min(delay_s * 2, _LONGEST_S))
            if size and size != code:
                looks += 1
                interpreter = find(tgid, self._proc)
                if interpreter is not None:
                    new[tgid] = self.found[tgid] = interpreter._replace(
                        problem=clean(interpreter.problem, 160)
                    )
        return new
