"""Synchronous CPU work on the event loop, or, without a loop, of the one that serves: a slow chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.engine.middleware import burn
from tests.faults.host import proofs
from tests.faults.host.fault import HTTP, VLLM, Culprit, Fault, Hands, Injected, Inside


class Burst(Inside):
    """Burns CPU before every request."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self, settings: Mapping[str, Any]) -> None:
        self.seconds = float(settings["seconds"])

    async def on_loop(self) -> None:
        burn(self.seconds)


INSIDE = Burst()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Let every request cost 90 to 140 ms on the loop; more in vLLM, whose requests take longer."""
    seconds = hands.rng.uniform(0.09, 0.14) * (1.6 if hands.server == VLLM else 1.0)
    pid = hands.pids["server"][0]
    used = proofs.Cpu([pid])
    await hands.switch("loop_burst", {"seconds": seconds})
    try:

        def names(culprit: Culprit) -> bool:
            return culprit["tgid"] == pid and culprit["tid"] in {pid, 0}

        def bites() -> str:
            used.check(0.3)
            return f"{seconds * 1000:.0f} ms on the event loop per request, {used.told()}"

        yield Injected(names, bites)
    finally:
        await hands.switch("loop_burst", None)


FAULT = Fault("loop_burst", ("python.loop_blocked",), inject, (HTTP, VLLM), per_s=3, code=("burn",))
