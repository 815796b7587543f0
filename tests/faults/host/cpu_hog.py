"""A busy neighbour on the server's CPU, in a heavier cgroup."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.cgroups import CpuGroup
from tests.demo.procs import python, spawn, stop
from tests.faults.host import proofs
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Measure what the server uses for a second; a hog's weight then leaves it a little less."""
    victims = hands.pids["worker" if hands.server == VLLM else "server"]
    used = proofs.Cpu(victims)
    await asyncio.sleep(1.0)
    if hands.server == VLLM:
        # A worker that spins loses all to a heavier group: only the hog's own rests leave it a share.
        weight, busy_ms, rest_ms = 8.0, hands.rng.uniform(50, 70), hands.rng.uniform(40, 50)
    else:
        weight = 1.0 / min(0.5, used.ratio() * hands.rng.uniform(0.75, 0.95)) - 1.0
        busy_ms, rest_ms = 100.0, 0.0
    group = CpuGroup("bench-hog")
    hog = None
    try:
        # Starts elsewhere: beside a thread that spins with sched_yield it might never get so far as to start.
        hog = spawn(
            python("tests.demo.hog", "--busy-ms", busy_ms, "--rest-ms", rest_ms),
            hands.rest_cpu,
            before_exec=group.join,
        )
        pid = hog.pid
        os.sched_setaffinity(pid, {hands.work_cpu})
        group.set_weight(weight)
        delay = proofs.RunDelay(victims)

        def names(culprit: Culprit) -> bool:
            return bool(culprit["tgid"] == pid)

        def bites() -> str:
            delay.check(0.1)
            return f"weight {weight:.1f}, busy {busy_ms:.0f} ms, rests {rest_ms:.0f} ms; {delay.told()}"

        yield Injected(names, bites)
    finally:
        if hog is not None:
            stop(hog)
        group.remove()


FAULT = Fault("cpu_hog", ("cpu.runqueue",), inject, (HTTP, THREADED, VLLM))
