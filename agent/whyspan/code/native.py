"""Names of native frames: from the places of a batch, as far as they are known, and for the others asked for later.

What is asked costs a process of its own for a part of a second, niced: how much CPU that may take is bounded.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from whyspan.code.asked import Module as Asked
from whyspan.code.asked import Question
from whyspan.code.names import Names, Range
from whyspan.code.places import VDSO, Module, Place, Places
from whyspan.code.symbolise import Answer, Asker, text

log = logging.getLogger("whyspan.collector")

#: Questions are at least so far apart, and few places wait longer: the more, the less CPU is left.
_EVERY_S: Final = 1.0
_FEW: Final = 8
_FEW_EVERY_S: Final = (5.0, 60.0)
#: The CPU that they may take: at once, and on average.
_BURST_S: Final = 4.0
_CORE_RATIO: Final = 0.005
_MAX_PLACES: Final = 4096  # waiting, and asked at once
_MAX_MODULES: Final = 128  # asked at once
MAX_STACKS: Final = 2000  # told again when their names are there
#: Names of code that a process makes while it runs are asked for again: its memory is used again, too.
_MADE_FOR_S: Final = 30.0
#: Without bcc, and after a failure, files are not asked about for so long.
_LATER_S: Final = 600.0
_END: Final = 1 << 63
#: Where threads begin, as far as that has a name.
_BEGINNINGS: Final = re.compile(
    r"_start|__libc_start_(?:main(?:_impl)?|call_main)|start_thread|(?:__)?clone3?|runtime\.goexit(?:\.abi0)?"
)
_LIBC: Final = ("libc.so", "libc-", "ld-musl", "libc.musl")


class Frames(NamedTuple):
    """Native frames as text, the innermost first. ``cut``: they do not reach the thread's beginning."""

    texts: list[str]
    cut: bool
    open: bool  # some have no name yet


class Native:
    """Names stacks. ``names_of`` is asked in each batch after ``learn``; ``tend`` asks and hears the symboliser."""

    def __init__(self, asker: Asker | None = None, places: Places | None = None) -> None:
        """Both are for tests."""
        self._asker = asker or Asker()
        self._places = places or Places()
        self._names = Names()
        self._waiting: OrderedDict[Hashable, tuple[Module, set[int]]] = OrderedDict()
        self._waiting_count = 0
        self._asked: list[tuple[Module, list[int]]] = []
        self._open: OrderedDict[int, tuple[list[Place], bool]] = OrderedDict()
        self._made_until_s: dict[Hashable, float] = {}
        self._credit_s, self._credit_at_s = _BURST_S, -1.0
        self._last_s, self._files_s = -_EVERY_S, 0.0
        self._made: list[tuple[int, list[int]]] = []
        #: How functions of files get their names: bcc, or why they get none.
        self.state = "nothing asked yet"
        self.cpu_s = 0.0
        self.questions = 0

    @property
    def tgid(self) -> int:
        """The symboliser's process id, 0 when it does not run."""
        return self._asker.tgid

    def forget(self, tgid: int) -> None:
        """Drop what is known of a process: it has ended, or executes another program."""
        self._places.forget(tgid)
        self._names.forget(("made", tgid))
        self._made_until_s.pop(("made", tgid), None)

    def learn(self, stacks: Mapping[int, Iterable[Sequence[int]]], now_s: float) -> None:
        """Look up the addresses of new stacks, given by process. *now_s* is CLOCK_MONOTONIC."""
        self._places.begin()
        for tgid, given in stacks.items():
            users = [u for u in given if u]
            leaves = {u[0] for u in users}
            callers = {a for u in users for a in u[1:]}
            if leaves:
                self._places.learn(tgid, leaves, callers, now_s)

    def of(self, stack: int, tgid: int, user: Sequence[int], now_s: float) -> Frames:
        """Return the frames of a stack; those that get names later are told by ``tend`` under its number."""
        places, broken = self._places.stack(tgid, user)
        frames = self._frames(places, broken, now_s)
        if frames.open:
            self._open[stack] = places, broken
            self._open.move_to_end(stack)
            if len(self._open) > MAX_STACKS:
                self._open.popitem(last=False)
        else:
            self._open.pop(stack, None)
        return frames

    def tend(self, now_s: float) -> dict[int, Frames]:
        """Ask, and take what was answered; never waits. Returns stacks, by number, whose frames have got names."""
        answer = self._asker.poll(now_s)
        if answer is not None:
            self._take(answer, now_s)
        elif not self._asker.tgid:
            self._ask(now_s)
        if answer is None or not self._open:
            return {}
        told: dict[int, Frames] = {}
        for stack, (places, broken) in list(self._open.items()):
            told[stack] = self._frames(places, broken, now_s)
            if not told[stack].open:
                del self._open[stack]
        return told

    def close(self) -> None:
        """End the symboliser."""
        self._asker.close()

    def _frames(self, places: Sequence[Place], broken: bool, now_s: float) -> Frames:
        texts = []
        waits = False
        for place in places:
            name = self._name(place, now_s)
            waits = waits or name is None
            texts.append(text(name, place.module.name) if name else place.label)
        return Frames(texts, broken or not reaches_beginning(texts), waits)

    def _name(self, place: Place, now_s: float) -> str | None:
        """Return a name, empty when there is none; None when it is asked for."""
        key = place.module.key
        if place.module.tgid and now_s >= self._made_until_s.get(key, _END):
            self._made_until_s.pop(key)
            self._names.forget(key)
        name = self._names.get(key, place.offset)
        if name is None:
            if not place.module.tgid and now_s < self._files_s:
                return ""
            self._wait(place)
        return name

    def _wait(self, place: Place) -> None:
        _, offsets = self._waiting.setdefault(place.module.key, (place.module, set()))
        if place.offset not in offsets and self._waiting_count < _MAX_PLACES:
            offsets.add(place.offset)
            self._waiting_count += 1

    def _ask(self, now_s: float) -> None:
        if self._credit_at_s >= 0:
            earned_s = (now_s - self._credit_at_s) * _CORE_RATIO
            self._credit_s = min(_BURST_S, self._credit_s + earned_s)
        self._credit_at_s = now_s
        every_s = _EVERY_S
        if self._waiting_count < _FEW:
            every_s = _FEW_EVERY_S[self._credit_s < _BURST_S / 2]
        if not self._waiting_count or now_s < self._last_s + every_s or self._credit_s <= 0:
            return
        self._last_s = now_s
        self._asked = []
        question = Question()
        while self._waiting and len(self._asked) < _MAX_MODULES:
            _, (module, offsets) = self._waiting.popitem(last=False)
            self._waiting_count -= len(offsets)
            # Others of the same function may have been asked about already.
            wanted = sorted(o for o in offsets if self._names.get(module.key, o) is None)
            if wanted and module.tgid:
                question.made.append((module.tgid, wanted))
            elif wanted:
                self._asked.append((module, wanted))
        if not self._asked and not question.made:
            return
        # What takes longest comes last.
        self._asked.sort(key=lambda one: one[0].id.size if one[0].id is not None else 0)
        question.modules = [
            Asked(
                m.path.encode(errors="replace").decode(),  # a path that is no text leads nowhere
                list(m.holders.items()),
                m.id,
                m.inode,
                offsets,
                m.key == VDSO,
            )
            for m, offsets in self._asked
        ]
        self._made = question.made
        try:
            self._asker.ask(question, now_s)
            self.questions += 1
        except OSError as e:
            self._put_off(now_s, f"the symboliser cannot be started: {e.strerror}")

    def _take(self, answer: Answer, now_s: float) -> None:
        self.cpu_s += answer.cpu_s
        self._credit_s -= answer.cpu_s
        for tgid, addresses in self._made:
            key = ("made", tgid)
            self._made_until_s[key] = now_s + _MADE_FOR_S
            self._put(key, addresses, answer.made.get(tgid, []))
        if answer.by != "bcc":
            self._put_off(now_s, answer.why)
            return
        if self.state != "bcc":
            log.info("functions of native frames are named by bcc")
            self.state = "bcc"
        for number, (module, offsets) in enumerate(self._asked):
            if number in answer.modules:
                self._put(module.key, offsets, answer.modules[number])
                continue
            if not answer.whole:
                # It ended over this one: which is not asked about again; the others are.
                log.info("no names of functions in %s: %s", module.name, answer.why)
                self._names.put(module.key, Range(0, _END, ""))
                for later, rest in self._asked[number + 1 :]:
                    for offset in rest:
                        self._wait(Place(later, offset, ""))
            return

    def _put(self, key: Hashable, offsets: Sequence[int], ranges: Iterable[Range]) -> None:
        for one in ranges:
            self._names.put(key, one)
        for offset in offsets:
            if self._names.get(key, offset) is None:
                self._names.put(key, Range(offset, offset + 1, ""))

    def _put_off(self, now_s: float, why: str) -> None:
        """Go on with modules and offsets."""
        self._files_s = now_s + _LATER_S
        if self.state != why:
            log.info("functions of native frames get no names: %s", why)
            self.state = why


def reaches_beginning(texts: Sequence[str]) -> bool:
    """Whether the outermost frame is where a thread begins, or what calls main: a stripped libc has no name for it."""
    if not texts:
        return False
    function, _, module = texts[-1].partition(" [")
    if _BEGINNINGS.fullmatch(function):
        return True
    above = texts[-2].partition(" [")[0] if len(texts) > 1 else ""
    return above == "main" and not module and function.startswith(_LIBC)
