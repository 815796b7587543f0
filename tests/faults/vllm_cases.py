"""The fault cases of a real vLLM server on the CPU: a roomy one, and one with a small pool of KV blocks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.engine import vllm
from tests.faults.case import Body, Case, World, process, traced
from tests.faults.lab_cases import frozen, hogged

#: Tokens that all victims' prompts begin with.
SHARED = [3 + i % 900 for i in range(1536)]
_numbers = random.Random(7)


def unique(n: int) -> list[int]:
    """Return tokens that no other prompt has."""
    return [_numbers.randrange(3, vllm.VOCABULARY) for _ in range(n)]


def ask(prompt: list[int], max_tokens: int, **more: Any) -> Body:
    """Return the body of a streamed completion."""
    return {
        "model": vllm.NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }


def healthy() -> Body:
    """A long shared prefix, a short question, eight tokens."""
    return ask(SHARED + unique(16), 8)


def small() -> Body:
    """The same for a small pool."""
    return ask(SHARED[:512] + unique(16), 8)


def attack(
    *attackers: Callable[[World], Awaitable[None]], victim: Callable[[], Body] | None = None
) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """Return an injector: others that keep asking, other bodies of the victims."""

    @asynccontextmanager
    async def inject(world: World) -> AsyncIterator[None]:
        world.victim = victim
        tasks = [asyncio.ensure_future(a(world)) for a in attackers]
        try:
            yield
        finally:
            world.victim = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return inject


async def long_prompts(world: World) -> None:
    """One prompt of 2,000 tokens after the other."""
    while True:
        await world.client.other("prefill", ask(unique(2000), 1))


async def costly(world: World) -> None:
    """One generation of many sequences with logprobs after the other."""
    while True:
        await world.client.other("costly", ask(unique(8), 100, n=24, logprobs=20))


async def occupant(world: World) -> None:
    """A long generation that holds a slot."""
    while True:
        await world.client.other("occupant", ask(unique(16), 100))


async def hungry(world: World) -> None:
    """Long generations that fill the pool."""
    while True:
        await world.client.other("hungry", ask(unique(64), 1000))


async def leaver(world: World) -> None:
    """A client that leaves at once; a middleware keeps the engine from being told."""

    async def leave() -> None:
        await asyncio.sleep(0.15)

    while True:
        await world.client.other("leaver", ask(unique(16), 90), leave)
        await asyncio.sleep(1.0)


async def forget(world: World) -> None:
    """Empty the prefix cache again and again."""
    while True:
        await world.client.post("/reset_prefix_cache", {})
        await asyncio.sleep(0.05)


def deaf(
    inner: Callable[[World], AbstractAsyncContextManager[None]],
) -> Callable[[World], AbstractAsyncContextManager[None]]:
    """Return an injector that also keeps the server from hearing of clients that leave."""

    @asynccontextmanager
    async def inject(world: World) -> AsyncIterator[None]:
        switch = world.folder / "deaf"
        switch.touch()
        try:
            async with inner(world):
                yield
        finally:
            switch.unlink()

    return inject


def changed_start() -> Body:
    """The shared prefix behind a token that changes each time."""
    return ask([*unique(1), *SHARED[1:], *unique(16)], 8)


ROOMY = (
    Case("prefill", ("engine.prefill_interference",), attack(long_prompts), traced("prefill"), 10, 5),
    Case(
        "costly",
        # The parent's id is right too: its 24 prompts are computed as well as its 24 continuations.
        ("engine.costly_neighbour", "engine.prefill_interference"),
        attack(costly, costly),
        traced("costly"),
        10,
        3,
    ),
    Case("evicted", ("engine.prefix_miss",), attack(forget), seconds=10, per_s=2),
    Case("diverged", ("engine.prefix_miss",), attack(victim=changed_start), seconds=10, per_s=1.5),
    Case("stress", ("cpu.runqueue",), hogged(None, -19), seconds=8),
    Case("frozen", ("engine.frozen", "engine.liveness"), frozen, process("worker"), 6, 1.5, open_report=True),
)
SMALL = (
    Case("queue", ("engine.queueing",), attack(*[occupant] * 6), process("core"), 10, 2),
    Case("kv", ("engine.kv_preemption",), attack(*[hungry] * 3), traced("hungry"), 12, 2),
    Case("zombie", ("engine.zombie_request",), deaf(attack(*[leaver] * 4)), traced("leaver"), 12, 2),
)
