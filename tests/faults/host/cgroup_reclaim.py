"""A memory cgroup at its limit: each request takes fresh memory, and its thread has to swap older memory out for it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host import zram
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Inside, Launch
from tests.faults.host.groups import MemoryGroup

LIMIT = 256 << 20
ZRAM_MIB = 384
#: What is kept of the fresh memory: more than the limit, so that each piece displaces as much of an older one.
KEPT_MIB = 288


class INSIDE(Inside):
    """The pieces kept."""

    def __init__(self) -> None:
        self._kept: deque[mmap.mmap] = deque()
        self._lock = Lock()
        self._mib = 0
        self._block = b""

    def start(self, settings: Mapping[str, Any]) -> None:
        """Fill what is left below the limit."""
        self._mib, self._block = int(settings["mib"]), os.urandom(1 << 20)
        for _ in range(KEPT_MIB // self._mib):
            self.on_worker()

    def stop(self) -> None:
        """Give everything back."""
        with self._lock:
            self._mib = 0
            while self._kept:
                self._kept.popleft().close()

    def on_worker(self) -> None:
        """Fill a fresh piece, without holding the GIL, and drop the oldest."""
        mib = self._mib
        if not mib:
            return
        memory = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.c_char.from_buffer(memory)
        for at in range(mib):
            ctypes.memmove(ctypes.addressof(start) + (at << 20), self._block, 1 << 20)
        del start
        with self._lock:
            self._kept.append(memory)
            while len(self._kept) * mib > KEPT_MIB:
                self._kept.popleft().close()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Swap in compressed memory, and pieces of a size that takes tens of ms to displace."""
    mib = hands.rng.randint(18, 22)
    group = MemoryGroup(f"bench-{hands.server}", LIMIT)
    with zram.swap(ZRAM_MIB):
        try:
            await hands.switch("cgroup_reclaim", {"mib": mib})
            hits, swapped = group.hits(), _swapped_out()

            def names(culprit: Culprit) -> bool:
                return bool(culprit["kind"] == "cgroup" and culprit["name"] == group.path)

            def bites() -> str:
                more, pages = group.hits() - hits, _swapped_out() - swapped
                told = f"{mib} MiB a request; {more} times at the limit, {pages} pages swapped out"
                if more < 100 or pages < 10_000:
                    raise DemoError(f"it does not bite: {told}")
                return told

            yield Injected(names, bites)
        finally:
            await hands.switch("cgroup_reclaim", None)


def _swapped_out() -> int:
    with open("/proc/vmstat") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("pswpout "))


FAULT = Fault(
    "cgroup_reclaim",
    ("memory.cgroup_limit",),
    inject,
    (HTTP, THREADED),
    launch=Launch(memory_bytes=LIMIT),
    per_s=2.0,
)
