"""Clients that give up after a time-out and try again after equal delays, so that the server queues."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.demo.procs import DemoError
from tests.engine.middleware import burn
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Inside

AGENT = "OpenAI/Python"
TRIES = 4
CLIENTS = 8


class Costly(Inside):
    """Makes every request cost some CPU before it is worked on: nothing by itself, all that retries do."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.loop = False

    def start(self, settings: Mapping[str, Any]) -> None:
        self.seconds, self.loop = float(settings["seconds"]), bool(settings["loop"])

    async def on_loop(self) -> None:
        burn(self.seconds)

    def on_worker(self) -> None:
        if not self.loop:
            burn(self.seconds)


INSIDE = Costly()


class _Clients:
    """Each goes through its attempts, rests a little, and begins again."""

    def __init__(self, hands: Hands, timeout_s: float, delay_s: float) -> None:
        self.hands, self.timeout_s, self.delay_s = hands, timeout_s, delay_s
        self.first = self.sent = self.lost = 0

    async def run(self) -> None:
        while True:
            self.first += 1
            trace = os.urandom(16).hex()
            for tried in range(TRIES):
                self.sent += 1
                if await self._attempt(trace):
                    break
                self.lost += 1
                if tried + 1 < TRIES:
                    await asyncio.sleep(self.delay_s)
            await asyncio.sleep(self.hands.rng.uniform(0.05, 0.3))

    async def _attempt(self, trace: str) -> bool:
        body = json.dumps({"max_tokens": 40, "prompt": "again and again", "model": "lab"}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: lab\r\nuser-agent: {AGENT}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ntraceparent: 00-{trace}-{os.urandom(8).hex()}-01\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer = None
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await asyncio.open_connection(self.hands.host, self.hands.port)
                writer.write(head.encode() + body)
                return bool(await reader.read()) and reader.at_eof()
        except (TimeoutError, OSError):
            return False
        finally:
            if writer is not None:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """A time-out shorter than an answer takes: each attempt is lost, and all of its work is done all the same."""
    clients = _Clients(hands, hands.rng.uniform(0.2, 0.25), hands.rng.uniform(0.1, 0.2))
    await hands.switch("retry_storm", {"seconds": 0.012, "loop": hands.server != THREADED})
    tasks = [asyncio.ensure_future(clients.run()) for _ in range(CLIENTS)]
    try:
        await asyncio.sleep(2.0)

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "peer" and AGENT in culprit["name"]

        def bites() -> str:
            if clients.sent < 1.5 * clients.first or clients.lost < CLIENTS:
                raise DemoError(f"it does not bite: {clients.sent} attempts of {clients.first} requests")
            return f"{clients.sent} attempts of {clients.first} requests, {clients.lost} given up"

        yield Injected(names, bites)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await hands.switch("retry_storm", None)


FAULT = Fault("retry_storm", ("client.retry_storm",), inject, (HTTP,), seconds=6)
