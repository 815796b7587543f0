"""A pool of the server's own threads that want more CPUs than it has: a native library with a thread per core."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.faults.host import proofs
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Inside

BLOCK = b"x" * (16 << 20)  # hashed without the interpreter lock


class Pool(Inside):
    """Threads that hash."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, settings: Mapping[str, Any]) -> None:
        self._stop.clear()
        self._threads = [threading.Thread(target=self._hash, daemon=True) for _ in range(settings["threads"])]
        for thread in self._threads:
            thread.start()

    def _hash(self) -> None:
        while not self._stop.is_set():
            hashlib.sha256(BLOCK).digest()

    def stop(self) -> None:
        self._stop.set()


INSIDE = Pool()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Let 14 to 20 threads hash."""
    threads = hands.rng.randint(14, 20)
    pid = hands.pids["server"][0]
    delay = proofs.RunDelay([pid])
    await hands.switch("oversubscribed", {"threads": threads})
    try:

        def names(culprit: Culprit) -> bool:
            return bool(culprit["tgid"] == pid)

        def bites() -> str:
            delay.check(2.0)
            return f"{threads} threads hash on one CPU; {delay.told()}"

        yield Injected(names, bites)
    finally:
        await hands.switch("oversubscribed", None)


FAULT = Fault("oversubscribed", ("cpu.oversubscribed",), inject, (HTTP, THREADED))
