"""A sibling thread in native code that keeps the interpreter lock."""

from __future__ import annotations

import ctypes
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host.fault import HTTP, THREADED, VLLM, Fault, Hands, Injected
from tests.faults.host.native import Keeper, kept, library


class Hog(Keeper):
    """Calls a function that computes and never lets the interpreter lock go."""

    name = "tokenizer"

    def prepare(self) -> None:
        self.lib = library(self.settings["library"], keeps_gil=True)

    def keep(self, seconds: float) -> None:
        begin = time.monotonic()
        self.lib.locks_spin(ctypes.c_double(seconds))
        # Whoever wanted to run Python meanwhile waited that long.
        self.tell(f"wait {(time.monotonic() - begin) * 1000:.3f}")


INSIDE = Hog()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Keep it for 90 to 130 ms, with rests as long as that; for longer in vLLM, whose requests take longer."""
    seconds = hands.rng.uniform(0.09, 0.13) * (1.8 if hands.server == VLLM else 1.0)
    async with kept(hands, "gil_hog", 60.0, seconds=seconds, rest=0.09) as injected:
        yield injected


FAULT = Fault("gil_hog", ("python.gil",), inject, (HTTP, THREADED, VLLM), code=("Hog.keep",))
