"""The ring of stacks, decoded and named: what the samplers send of each stack that was not seen lately."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

import msgspec
from whyspan_probes.shared_maps import SharedMaps

from whyspan.code.codeobjects import Code, CodeObjects
from whyspan.code.interpreters import Interpreter, Interpreters
from whyspan.code.kernelsymbols import KernelSymbols
from whyspan.code.native import MAX_STACKS, Frames, Native
from whyspan.code.workkinds import WorkKinds
from whyspan.lru import Lru
from whyspan.model import CodeFrame, StackFact

#: ``struct whyspan_stack`` of python.bpf.h up to its words: id, tgid, flags, frames of kernel, program and Python.
_HEAD: Final = struct.Struct("<QIHBBI4x")
_MAX_PER_BATCH: Final = 2000
#: In the flags of what is told: the native frames do not reach the thread's beginning.
_NATIVE_CUT: Final = 64


class _Raw(NamedTuple):
    id: int
    tgid: int
    flags: int
    kernel: tuple[int, ...]
    user: tuple[int, ...]
    python: tuple[tuple[int, int, int], ...]  # address of the code object, check, offset of the instruction


def parse(record: bytes) -> _Raw | None:
    """Take a record apart; None when it is none."""
    if len(record) < _HEAD.size:
        return None
    number, tgid, flags, kernel, user, python = _HEAD.unpack_from(record)
    words = kernel + user + 2 * python
    if len(record) < _HEAD.size + 8 * words:
        return None
    values = struct.unpack_from(f"<{words}Q", record, _HEAD.size)
    rest = values[kernel + user :]
    frames = tuple((rest[i], rest[i + 1] >> 32, rest[i + 1] & 0xFFFFFFFF) for i in range(0, 2 * python, 2))
    return _Raw(number, tgid, flags, values[:kernel], values[kernel : kernel + user], frames)


class Stacks:
    """Follows the interpreters of watched processes, and names what their threads were in."""

    def __init__(self, maps: SharedMaps, kinds: WorkKinds | None = None) -> None:
        self._maps = maps
        self._kinds = kinds or WorkKinds()
        self._codes = CodeObjects()
        self._kernel = KernelSymbols()
        self.native = Native()
        self._told: Lru[int, StackFact] = Lru(MAX_STACKS)  # some of their frames have no names yet
        self.interpreters = Interpreters()
        # Before there are events to drain: it takes too long to be done in between.
        self._kernel.load()
        self.bad = 0
        self.crowded_out = 0

    @property
    def stale(self) -> int:
        """Frames whose code object had become another one before it was read."""
        return self._codes.stale

    def follow(self, tgids: Collection[int], now_s: float) -> dict[int, Interpreter]:
        """Tell the samplers of the interpreters that are new, and return these. *now_s* is CLOCK_MONOTONIC."""
        new = self.interpreters.follow(tgids, now_s)
        for tgid, one in new.items():
            if one.layout is not None:
                try:
                    self._maps.set_python(tgid, one.layout.pack(one.runtime))
                except OSError:  # as many as may be watched fit
                    continue
        return new

    @property
    def naming(self) -> bool:
        """Whether there are native frames that may still get a name."""
        return len(self._told) > 0

    def again(self, tgid: int) -> None:
        """The process executes another program, or has ended."""
        self.interpreters.again(tgid)
        self._codes.forget(tgid)
        self.native.forget(tgid)

    def close(self) -> None:
        """End what names native frames."""
        self.native.close()

    def take(self, now_s: float | None = None) -> list[StackFact]:
        """Return the stacks that have arrived since the last call, and those whose frames have got names since.

        *now_s* is CLOCK_MONOTONIC, for tests.
        """
        now_s = time.monotonic() if now_s is None else now_s
        records = self._maps.stacks.drain()
        self.crowded_out += max(0, len(records) - _MAX_PER_BATCH)
        raws = []
        for record in records[:_MAX_PER_BATCH]:
            raw = parse(record)
            if raw is None:
                self.bad += 1
            else:
                raws.append(raw)
        names: dict[int, dict[tuple[int, int], Code]] = {}
        for tgid in {r.tgid for r in raws if r.python}:
            one = self.interpreters.found.get(tgid)
            if one is not None and one.layout is not None:
                wanted = [(a, c) for r in raws if r.tgid == tgid for a, c, _ in r.python]
                names[tgid] = self._codes.resolve(tgid, one.layout, wanted)
        out = self._named_later(now_s)
        self.native.learn(_by_process(raws), now_s)
        return out + [self._named(r, names.get(r.tgid, {}), now_s) for r in raws]

    def _named_later(self, now_s: float) -> list[StackFact]:
        out: list[StackFact] = []
        for number, frames in self.native.tend(now_s).items():
            fact = self._told.get(number)
            if fact is not None:
                out.append(self._with(fact, frames))
                if not frames.open:
                    self._told.pop(number)
        return out

    def _named(self, raw: _Raw, names: dict[tuple[int, int], Code], now_s: float) -> StackFact:
        python = []
        for address, check, at in raw.python:
            code = names.get((address, check))
            python.append(
                CodeFrame(code.function, code.file, code.line(at))
                if code is not None
                else CodeFrame("", "", 0)
            )
        kernel = [self._kernel.name(a) for a in raw.kernel]
        fact = StackFact(raw.id, raw.tgid, raw.flags, python, [], [k for k in kernel if k])
        frames = self.native.of(raw.id, raw.tgid, raw.user, now_s)
        fact = self._with(fact, frames)
        if frames.open:
            self._told.put(raw.id, fact)
        return fact

    def _with(self, fact: StackFact, frames: Frames) -> StackFact:
        flags = fact.flags & ~_NATIVE_CUT | (_NATIVE_CUT if frames.cut else 0)
        work, hint = self._kinds.of(fact.python, frames.texts) or ("", "")
        return msgspec.structs.replace(fact, native=frames.texts, flags=flags, work=work, hint=hint)


def _by_process(raws: Iterable[_Raw]) -> dict[int, list[tuple[int, ...]]]:
    out: dict[int, list[tuple[int, ...]]] = {}
    for raw in raws:
        out.setdefault(raw.tgid, []).append(raw.user)
    return out
