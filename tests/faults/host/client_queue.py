"""A client that holds its requests back in a queue of its own, and measures that: no cause is the server's (N2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host import proofs
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected

_KNOWN = 12  # requests of the sender without a queue: its clock is known then


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Let the sender be known; the victims' queue is in what they ask."""
    for _ in range(_KNOWN):
        await hands.request(client={"queue_s": [0, 0]}, max_tokens=1)
    await asyncio.sleep(0.6)
    used = proofs.Cpu(hands.pids["server"])

    def names(culprit: Culprit) -> bool:
        return bool(culprit["kind"] == "peer")

    def bites() -> str:
        return f"held back for 0.1 to 0.4 s before they are sent; {used.told()} by the server"

    yield Injected(names, bites)


FAULT = Fault(
    "client_queue",
    ("client.self_queued", "client.artifact"),
    inject,
    (HTTP, THREADED, VLLM),
    victim={"client": {"queue_s": [0.1, 0.4]}},
)
