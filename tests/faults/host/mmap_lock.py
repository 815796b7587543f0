"""A thread that changes the protection of much memory: whoever maps or unmaps waits for the process's mmap_lock."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host.fault import HTTP, THREADED, Fault, Hands, Injected
from tests.faults.host.native import Keeper, kept

MIB = 1 << 20


class Protector(Keeper):
    """Protects a large region and makes it writable again; requests map, touch and unmap."""

    name = "protector"
    region: int | None = None

    def prepare(self) -> None:
        super().prepare()
        self.region = self.lib.locks_map(ctypes.c_size_t(self.settings["mib"] * MIB))

    def finish(self) -> None:
        self.lib.locks_unmap(ctypes.c_void_p(self.region), ctypes.c_size_t(self.settings["mib"] * MIB))

    def keep(self, seconds: float) -> None:
        size = ctypes.c_size_t(self.settings["mib"] * MIB)
        self.lib.locks_protect(ctypes.c_void_p(self.region), size, ctypes.c_double(seconds))

    def on_worker(self) -> None:
        self.tell(f"wait {self.lib.locks_touch(self.settings['times']) * 1000:.3f}")


INSIDE = Protector()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Protect 192 to 256 MiB for 200 ms at a time."""
    mib = hands.rng.randint(192, 256)
    async with kept(hands, "mmap_lock", 30.0, seconds=0.2, rest=0.02, mib=mib, times=8) as injected:
        yield injected


FAULT = Fault("mmap_lock", ("lock.contention",), inject, (HTTP, THREADED), per_s=4)
