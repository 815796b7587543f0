"""A debugger or profiler that stops the server's threads at intervals, by ptrace."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import DemoError, python, spawn, stop
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected


@asynccontextmanager
async def stopping(hands: Hands, how: str, pid: int) -> AsyncIterator[Injected]:
    """Stop a process for 120 to 180 ms, several times a second: longer than a request's own sleeps."""
    longer = 1.6 if hands.server == VLLM else 1.0  # its requests take longer, too
    hold_ms, rest_ms = hands.rng.uniform(120, 180) * longer, hands.rng.uniform(150, 250)
    log = hands.folder / f"stopper-{how}.log"
    with log.open("wb") as out:
        process = spawn(
            python("tests.faults.host.stopper", how, pid, hold_ms, rest_ms), hands.rest_cpu, stdout=out
        )
    tool = process.pid
    try:

        def names(culprit: Culprit) -> bool:
            return bool(culprit["tgid"] == tool)

        def bites() -> str:
            stops = [int(line) for line in log.read_text().split()]
            if len(stops) < 3 or not min(stops):
                raise DemoError(f"it does not bite: {len(stops)} stops")
            return f"{len(stops)} stops of {hold_ms:.0f} ms, every {hold_ms + rest_ms:.0f} ms"

        yield Injected(names, bites)
    finally:
        stop(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Trace the server; of vLLM its worker."""
    pid = hands.pids["worker" if hands.server == VLLM else "server"][0]
    async with stopping(hands, "trace", pid) as injected:
        yield injected


FAULT = Fault("tracer", ("observer.tracer",), inject, (HTTP, THREADED, VLLM))
