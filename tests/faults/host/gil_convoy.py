"""Threads that compute in Python: whoever wants the interpreter lock waits for 5 ms, the switch interval, each time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host.fault import HTTP, THREADED, Fault, Hands, Injected
from tests.faults.host.native import Keeper, kept


class Convoy(Keeper):
    """Threads that count; a request measures how long it waits for the interpreter lock after each of some rests."""

    name = "counter"

    def prepare(self) -> None:
        """Nothing native is needed."""

    def keep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            number += 1

    async def on_loop(self) -> None:
        self._measure()

    def on_worker(self) -> None:
        self._measure()

    def _measure(self) -> None:
        begin = time.monotonic()
        time.sleep(0.0005)  # lets the lock go and wants it again
        self.tell(f"wait {(time.monotonic() - begin) * 1000 - 0.5:.3f}")


INSIDE = Convoy()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Let two or three threads count, without rests worth the name."""
    threads = hands.rng.randint(2, 3)
    async with kept(
        hands, "gil_convoy", 4.0, threads=threads, seconds=hands.rng.uniform(0.3, 0.5), rest=0.02
    ) as injected:
        yield injected


FAULT = Fault("gil_convoy", ("python.gil",), inject, (HTTP, THREADED), per_s=3, code=("Convoy.keep",))
