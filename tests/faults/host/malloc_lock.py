"""One arena for all threads, and one of them keeps its lock: it gives free memory back, block by block."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host.fault import HTTP, THREADED, Fault, Hands, Injected, Launch
from tests.faults.host.native import Keeper, kept

BLOCKS = 20_000


class Trimmer(Keeper):
    """Leaves free blocks all over the heap, and trims it."""

    name = "trimmer"

    def prepare(self) -> None:
        super().prepare()
        self.lib.locks_litter(BLOCKS)

    def keep(self, seconds: float) -> None:
        self.lib.locks_trim(ctypes.c_double(seconds))

    def on_worker(self) -> None:
        self.tell(f"wait {self.lib.locks_allocate(5) * 1000:.3f}")


INSIDE = Trimmer()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Trim for 100 to 150 ms, with rests half as long."""
    seconds = hands.rng.uniform(0.10, 0.15)
    async with kept(hands, "malloc_lock", 20.0, seconds=seconds, rest=seconds / 2) as injected:
        yield injected


FAULT = Fault(
    "malloc_lock",
    ("lock.malloc",),
    inject,
    (HTTP, THREADED),
    launch=Launch(env=(("MALLOC_ARENA_MAX", "1"),)),
    per_s=4,
)
