"""Has all threads of a process looked at in one moment, when one that ought to serve requests has stalled."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from whyspan.syscalls import POLL

#: ``struct stalled`` of snapshots.bpf.c: since_ns, tid, syscall_nr, state.
_STALLED: Final = struct.Struct("<QIiI4x")
_BLOCKED: Final = 2
#: Of one process, and of all together, at most one in so many s: each thread holds its process's mmap lock some us.
PROCESS_EVERY_S: Final = 5.0
EVERY_S: Final = 1.0
_MAX_TOLD: Final = 4096

Walk = Callable[[str, Iterable[int]], Mapping[int, bytes]]


class Stall(NamedTuple):
    """A thread that has not given up the CPU of its own accord, or has been in one block, since then."""

    tid: int
    since_ns: int
    state: int
    syscall_nr: int


def stalls(printed: bytes) -> list[Stall]:
    """Decode what the program printed; half a record is none."""
    whole = len(printed) - len(printed) % _STALLED.size
    return [Stall(tid, since, state, nr) for since, tid, nr, state in _STALLED.iter_unpack(printed[:whole])]


class Snapshots:
    """Looks, and takes. `serving` and `ask` are the main thread's; `look` is called in the one that walks."""

    def __init__(self, walk: Walk, stall_ms: float) -> None:
        """*walk* runs a hook of the probe over processes; *stall_ms*: a stall is at least that long, 0: none is."""
        self._walk = walk
        self.stall_ms = stall_ms
        self.serving: frozenset[int] = frozenset()  # threads with a request in progress
        self._asked: set[int] = set()
        self._told: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._next_s = 0.0
        self._due_s: dict[int, float] = {}

    def ask(self, tgids: Iterable[int]) -> None:
        """Have these processes taken at the next look, stalled or not."""
        self._asked = self._asked | set(tgids)

    def look(self, tgids: Iterable[int], now_ns: int) -> None:
        """Look for stalls in these processes, and take those that have one. *now_ns* is CLOCK_MONOTONIC."""
        now_s = now_ns / 1e9
        asked, self._asked = self._asked, set()
        if self.stall_ms:
            printed = self._walk("look", tgids)
            asked |= {tgid for tgid, data in printed.items() if self._stalled(data, now_ns)}
        for tgid in sorted(asked):
            if now_s >= max(self._next_s, self._due_s.get(tgid, 0.0)):
                self._next_s = now_s + EVERY_S
                self._due_s[tgid] = now_s + PROCESS_EVERY_S
                self._walk("take", [tgid])
        self._due_s = {tgid: due_s for tgid, due_s in self._due_s.items() if due_s > now_s}

    def _stalled(self, printed: bytes, now_ns: int) -> bool:
        new = False
        for stall in stalls(printed):
            # A loop that waits for its sockets is at rest.
            resting = stall.state == _BLOCKED and stall.syscall_nr in POLL
            key = (stall.tid, stall.since_ns)
            if stall.tid not in self.serving or resting or key in self._told:
                continue
            if now_ns - stall.since_ns >= self.stall_ms * 1e6:
                self._told[key] = None
                new = True
        while len(self._told) > _MAX_TOLD:
            self._told.popitem(last=False)
        return new
