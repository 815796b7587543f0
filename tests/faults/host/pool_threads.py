"""A pool of few worker threads, all of them held by other requests' long jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Launch

WORKERS = 4


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Keep two more long requests in the server than it has workers."""
    tokens = hands.rng.randint(20, 28)
    pid = hands.pids["server"][0]
    began = time.monotonic()
    done, busy_s = 0, 0.0

    async def hold() -> None:
        nonlocal done, busy_s
        while True:
            begin = time.monotonic()
            if await hands.request(max_tokens=tokens) == 200:
                done += 1
                busy_s += time.monotonic() - begin

    holders = [asyncio.ensure_future(hold()) for _ in range(WORKERS + 2)]
    try:

        def names(culprit: Culprit) -> bool:
            return bool(culprit["kind"] == "thread" and culprit["tgid"] == pid)

        def bites() -> str:
            inside = busy_s / (time.monotonic() - began)
            if done < WORKERS or inside < WORKERS - 0.5:
                raise DemoError(
                    f"the workers are not busy: {done} long jobs, {inside:.1f} in the server on average"
                )
            return f"{done} jobs of {tokens} tokens, {inside:.1f} of them at a time for {WORKERS} workers"

        yield Injected(names, bites)
    finally:
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


FAULT = Fault(
    "pool_threads",
    ("python.pool_exhausted",),
    inject,
    (HTTP, THREADED),
    launch=Launch(args=("--workers", str(WORKERS))),
    per_s=4,
)
