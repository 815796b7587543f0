"""A process that stops the server with SIGSTOP and lets it go on with SIGCONT, as checkpointing and freezers do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.host.fault import HTTP, THREADED, VLLM, Fault, Hands, Injected
from tests.faults.host.tracer import stopping


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Stop the server's process."""
    async with stopping(hands, "signal", hands.pids["server"][0]) as injected:
        yield injected


FAULT = Fault("stopped", ("observer.tracer",), inject, (HTTP, THREADED, VLLM))
