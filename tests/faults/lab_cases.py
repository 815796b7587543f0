"""The fault cases of the lab engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.demo.procs import python, spawn, stop
from tests.faults.case import Body, Case, World, process, traced

SHARED = [100_000 + i for i in range(608)]
_numbers = random.Random(4)


def unique(n: int, low: int = 200_000, high: int = 900_000) -> list[int]:
    """Return tokens that no other prompt has."""
    return [_numbers.randrange(low, high) for _ in range(n)]


def healthy() -> Body:
    """A long shared prefix, a short question, eight tokens."""
    return {"prompt": SHARED + unique(32), "max_tokens": 8}


async def set_faults(world: World, **faults: Any) -> None:
    """Change what is wrong with the engine."""
    assert await world.client.post("/fault", faults) == 200


def fault(
    attack: Callable[[World], Awaitable[None]] | None = None,
    victim: Callable[[], Body] | None = None,
    **faults: Any,
) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """Return an injector: faults of the engine, an attack that goes on, other bodies of the victims."""

    @asynccontextmanager
    async def inject(world: World) -> AsyncIterator[None]:
        await set_faults(world, **faults)
        world.victim = victim
        task = asyncio.ensure_future(attack(world)) if attack is not None else None
        try:
            yield
        finally:
            world.victim = None
            if task is not None:
                task.cancel()
            await set_faults(world)

    return inject


async def long_prompts(world: World) -> None:
    """One prompt of 6,000 tokens after the other."""
    while True:
        await world.client.other("prefill", {"prompt": unique(6000), "max_tokens": 1})


async def logprobs(world: World) -> None:
    """One long generation with 100 logprobs per token after the other."""
    while True:
        await world.client.other("logprobs", {"prompt": unique(8), "max_tokens": 400, "logprobs": 100})


async def occupants(world: World) -> None:
    """Long generations that hold the slots."""
    held = [world.client.other("occupant", {"prompt": unique(16), "max_tokens": 60}) for _ in range(2)]
    while True:
        await asyncio.gather(*held)
        held = [world.client.other("occupant", {"prompt": unique(16), "max_tokens": 60}) for _ in range(2)]


async def hungry(world: World) -> None:
    """Long generations of long prompts that fill the block pool."""

    async def one() -> None:
        while True:
            await world.client.other("hungry", {"prompt": unique(400), "max_tokens": 500})

    await asyncio.gather(one(), one(), one(), one())


async def leavers(world: World) -> None:
    """Clients that leave at once; the engine is not told."""

    async def leave() -> None:
        await asyncio.sleep(0.1)

    while True:
        body = {"prompt": unique(16), "max_tokens": 700}
        await asyncio.gather(*(world.client.other("leaver", body, leave) for _ in range(2)))
        await asyncio.sleep(1.5)


async def many_streams(world: World) -> None:
    """Twelve streams beside the victims', so that the front end has no rest."""

    async def one() -> None:
        while True:
            await world.client.other("stream", {"prompt": unique(16), "max_tokens": 64})

    await asyncio.gather(*(one() for _ in range(10)))


def changed_start() -> Body:
    """The shared prefix behind a token that changes each time."""
    return {"prompt": [*unique(1), *SHARED[1:], *unique(32)], "max_tokens": 8}


def inflated() -> Body:
    """As many bytes, made of short tokens."""
    size = len(str(healthy()["prompt"]))
    return {"prompt": [_numbers.randrange(1, 10) for _ in range(size // 3)], "max_tokens": 8}


@asynccontextmanager
async def frozen(world: World) -> AsyncIterator[None]:
    """Stop a worker by a signal."""
    worker = world.pids["worker"][0]
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@asynccontextmanager
async def slow_readers(world: World) -> AsyncIterator[None]:
    """Large chunks to clients that take a pause after every 64 KiB."""
    async with fault(chunk_bytes=300_000)(world):
        world.client.pause_s = 0.004
        try:
            yield
        finally:
            world.client.pause_s = 0.0


def hogged(
    inner: Callable[[World], AbstractAsyncContextManager[None]] | None, nice: int
) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """Return an injector with a busy process on the engine's CPU beside it."""

    @asynccontextmanager
    async def inject(world: World) -> AsyncIterator[None]:
        hog = spawn(python("tests.demo.hog"), world.cpu, stdout=subprocess.DEVNULL)
        try:
            with open(f"/proc/{hog.pid}/autogroup", "w") as f:
                f.write(str(nice))
            if inner is None:
                yield
            else:
                async with inner(world):
                    yield
        finally:
            stop(hog)

    return inject


CASES = (
    Case("prefill", ("engine.prefill_interference",), fault(long_prompts), traced("prefill")),
    Case(
        "costly",
        ("engine.costly_neighbour", "engine.prefill_interference"),
        fault(logprobs),
        traced("logprobs"),
    ),
    Case("queue", ("engine.queueing",), fault(occupants, max_num_seqs=2), process("core")),
    Case("kv", ("engine.kv_preemption",), fault(hungry, blocks=150), traced("hungry")),
    Case(
        "zombie",
        ("engine.zombie_request",),
        fault(leavers, max_num_seqs=2, keep_zombies=True),
        traced("leaver"),
    ),
    Case("timer", ("engine.batch_timer", "engine.queueing"), fault(batch_wait_s=0.05), process("core")),
    Case("evicted", ("engine.prefix_miss",), fault(forget_cache=True)),
    Case("diverged", ("engine.prefix_miss",), fault(victim=changed_start)),
    Case("inflated", ("engine.token_inflation",), fault(victim=inflated), per_s=4),
    Case("transfer", ("engine.kv_transfer",), fault(remote_kv_s=0.08)),
    Case("adapter", ("engine.reload",), fault(adapter_s=0.06), process("core")),
    Case("compile", ("engine.jit_compile",), fault(compile=True), seconds=8.0, per_s=3),
    Case(
        "recompile", ("engine.recompile", "engine.jit_compile"), fault(compile=True, again=True), seconds=6.0
    ),
    Case("straggler", ("engine.straggler",), fault(straggler_s=0.012), process("worker")),
    Case("speculation", ("engine.speculation",), fault(drafts=6), process("core")),
    Case("copies", ("engine.ipc_copy", "engine.ipc"), fault(payload_bytes=3 << 20), process("core"), per_s=5),
    Case("schedule", ("engine.cpu_bound_step",), fault(schedule_s=0.012), process("core")),
    Case("spin", ("engine.ipc_spin", "engine.ipc"), fault(spin=True), process("core")),
    Case(
        "frontend", ("python.frontend_saturated",), fault(many_streams, chunk_cpu_s=0.002), process("front")
    ),
    Case("delivery", ("net.delivery",), slow_readers, per_s=4),
    Case("model", ("engine.model_changed",), fault(slow_model=4.0, dtype="float64"), process("core")),
    Case("frozen", ("engine.frozen", "engine.liveness"), frozen, process("worker"), 7, 4, open_report=True),
    Case("kv+stress", ("engine.kv_preemption",), hogged(fault(hungry, blocks=150), 19), traced("hungry")),
    Case("stress+full", ("cpu.runqueue",), hogged(fault(blocks=400), -18)),
)
