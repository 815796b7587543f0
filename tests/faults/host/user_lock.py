"""A mutex of the server's own code that a background thread has for long, half of the time asleep."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host.fault import HTTP, THREADED, Fault, Hands, Injected
from tests.faults.host.native import Keeper, kept


class Mutex(Keeper):
    """A thread that keeps a pthread mutex; requests take it once."""

    name = "ledger"

    def keep(self, seconds: float) -> None:
        self.lib.locks_hold(ctypes.c_double(seconds))

    def on_worker(self) -> None:
        self.tell(f"wait {self.lib.locks_take() * 1000:.3f}")


INSIDE = Mutex()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Keep it for 120 to 180 ms, with short rests."""
    seconds = hands.rng.uniform(0.12, 0.18)
    async with kept(hands, "user_lock", 40.0, seconds=seconds, rest=0.02) as injected:
        yield injected


FAULT = Fault(
    "user_lock",
    ("lock.contention",),
    inject,
    (HTTP, THREADED),
    per_s=4,
    code=("Mutex.keep", "Mutex.on_worker"),
)
