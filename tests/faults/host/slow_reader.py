"""Clients that read slower than the server writes: its output waits for room in the socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Launch

CHUNK, BUFFER = 300_000, 1 << 16
_LIMITED = re.compile(r"rwnd_limited:(\d+)ms")


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Watch the kernel's own account of what limits the connections; the victims do the rest."""
    limited: list[int] = []

    async def look() -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                *("ss", "-Htni", "sport", "=", f":{hands.port}"), stdout=asyncio.subprocess.PIPE
            )
            told, _ = await process.communicate()
            limited.extend(int(ms) for ms in _LIMITED.findall(told.decode()))
            await asyncio.sleep(0.2)

    task = asyncio.ensure_future(look())
    try:

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "peer" and bool(culprit["name"])

        def bites() -> str:
            if max(limited, default=0) < 20:
                raise DemoError("no connection was limited by its receiver's window")
            return f"limited by the receiver's window for up to {max(limited)} ms"

        yield Injected(names, bites)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


FAULT = Fault(
    "slow_reader",
    ("net.delivery",),
    inject,
    (HTTP, THREADED),
    launch=Launch(args=("--send-buffer", str(BUFFER))),
    per_s=4,
    victim={"chunk_bytes": CHUNK, "client": {"pause_s": 0.006, "receive_buffer": BUFFER}},
)
