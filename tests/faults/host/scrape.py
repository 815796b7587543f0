"""Metrics served on the event loop: an exposition of 80 to 150 ms, scraped twice a second by a Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.demo.procs import DemoError
from tests.engine.middleware import burn
from tests.faults.host.fault import HTTP, Culprit, Fault, Hands, Injected, Inside

EVERY_S = 0.5
AGENT = "Prometheus/2.53.0"


class Exposition(Inside):
    """Answers ``/metrics`` with some series that took long to format."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self, settings: Mapping[str, Any]) -> None:
        self.seconds = float(settings["seconds"])

    def routes(self) -> Mapping[str, Callable[[], bytes]]:
        return {"/metrics": self._answer}

    def _answer(self) -> bytes:
        burn(self.seconds)
        return b"".join(b'requests_total{route="/%d"} 1\n' % n for n in range(500))


INSIDE = Exposition()


async def _scrape(host: str, port: int) -> bool:
    head = f"GET /metrics HTTP/1.1\r\nhost: {host}:{port}\r\nuser-agent: {AGENT}\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode())
        return (await reader.read()).startswith(b"HTTP/1.1 200")
    finally:
        writer.close()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Scrape for as long as it is on."""
    seconds = hands.rng.uniform(0.08, 0.15)
    pid, scraped = hands.pids["server"][0], 0

    async def run() -> None:
        nonlocal scraped
        while True:
            with suppress(OSError):
                scraped += await _scrape(hands.host, hands.port)
            await asyncio.sleep(EVERY_S)

    await hands.switch("scrape", {"seconds": seconds})
    task = asyncio.ensure_future(run())
    try:

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "request" and "/metrics" in culprit["name"] and culprit["tgid"] == pid

        def bites() -> str:
            if scraped < 3:
                raise DemoError(f"it does not bite: only {scraped} scrapes were answered")
            return f"{scraped} scrapes of {seconds * 1000:.0f} ms on the event loop"

        yield Injected(names, bites)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await hands.switch("scrape", None)


FAULT = Fault("scrape", ("observer.scrape",), inject, (HTTP,), seconds=6, decoys=("scrape",), per_s=8)
