"""Clients whose bodies trickle in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected
from tests.faults.host.proofs import Cpu

UPLOAD_S = 0.25


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Nothing is done to the server: the victims send their bodies slowly."""
    used = Cpu(hands.pids["server"])

    def names(culprit: Culprit) -> bool:
        return bool(culprit["kind"] == "peer")

    def bites() -> str:
        if used.ratio() > 0.9:
            raise DemoError(f"the server is busy itself: {used.told()}")
        return f"bodies over {UPLOAD_S * 1000:.0f} ms; {used.told()} by the server"

    yield Injected(names, bites)


FAULT = Fault(
    "slow_upload",
    ("client.artifact",),
    inject,
    (HTTP, THREADED),
    victim={"client": {"upload_s": UPLOAD_S}, "filler": "x" * 2000},
)
