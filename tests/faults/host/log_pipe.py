"""Whoever reads the server's log stops again and again: the pipe fills, and a synchronous log line waits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Stop it by a signal for a part of every period."""
    reader = hands.pids["log_reader"][0]
    stopped_s, runs_s = hands.rng.uniform(1.2, 1.8), hands.rng.uniform(0.4, 0.8)
    pipe = os.readlink(f"/proc/{hands.pids['server'][0]}/fd/2")
    waited: set[str] = set()

    async def stutter() -> None:
        while True:
            os.kill(reader, signal.SIGSTOP)
            for _ in range(int(stopped_s / 0.05)):
                await asyncio.sleep(0.05)
                for task in Path(f"/proc/{hands.pids['server'][0]}/task").iterdir():
                    with suppress(OSError):
                        if "pipe_write" in (task / "wchan").read_text():
                            waited.add(task.name)
            os.kill(reader, signal.SIGCONT)
            await asyncio.sleep(runs_s)

    task = asyncio.ensure_future(stutter())
    try:

        def names(culprit: Culprit) -> bool:
            return culprit["tgid"] == reader or pipe in {culprit["name"], culprit["detail"]}

        def bites() -> str:
            if not waited:
                raise DemoError("no thread of the server was seen in pipe_write")
            return f"stopped for {stopped_s:.1f} s at a time; {len(waited)} threads seen in pipe_write"

        yield Injected(names, bites)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.kill(reader, signal.SIGCONT)


FAULT = Fault(
    "log_pipe",
    ("io.log_blocked",),
    inject,
    (HTTP, THREADED, VLLM),
    code=("log", "StreamHandler.flush", "StreamHandler.emit"),
)
