"""The soak's requests and its receiver: a rate that holds on average, every request told, every span counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.demo.truth import Sent
from tests.faults.host.client import CAP_S, HostClient
from tests.unit.receivers import HttpReceiver

#: While it makes up for what a fault left out, it sends so many times the usual rate.
CATCH_UP = 2.0


class CountingClient(HostClient):
    """Keeps every request, also those that switch faults: the agent counts them all."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.everything: list[Sent] = []

    async def _send(self, path: str, body: Mapping[str, Any], trace: str) -> Sent:
        done = await super()._send(path, body, trace)
        self.everything.append(done)
        return done


class Load:
    """An open loop with *per_s* on average. A fault may ask for less while it is on: ``limit``, 0 for none."""

    def __init__(self, client: HostClient, per_s: float, body: Callable[[], Mapping[str, Any]]) -> None:
        self.limit = 0.0
        self.begun = 0
        self._client, self._per_s, self._body = client, per_s, body
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin."""
        self._loop = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        began = due = time.monotonic()
        while True:
            task = asyncio.ensure_future(self._client.victim(self._body()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.begun += 1
            now = time.monotonic()
            behind = (now - began) * self._per_s - self.begun
            rate = self.limit or self._per_s * (CATCH_UP if behind > self._per_s else 1.0)
            # After a standstill of this process: no burst, the average is made up for at the rate above.
            due = max(due + 1 / rate, now - 1.0)
            await asyncio.sleep(max(due - now, 0))

    async def stop(self) -> None:
        """Begin no more, and wait for those under way."""
        if self._loop is not None:
            self._loop.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CAP_S)
        await self._client.close()


class Spans:
    """A receiver of OTLP that goes away and comes back at the same port, and forgets what it has counted."""

    def __init__(self) -> None:
        self._receiver: HttpReceiver | None = HttpReceiver()
        self._port = self._receiver.port
        self.traces: dict[str, int] = {}  # spans by trace id
        self.refused = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def take(self) -> None:
        """Count what has come since."""
        if self._receiver is None:
            return
        some = len(self._receiver.traces)
        for request in self._receiver.traces[:some]:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        trace = span.trace_id.hex()
                        self.traces[trace] = self.traces.get(trace, 0) + 1
        del self._receiver.traces[:some]
        for kept in (self._receiver.metrics, self._receiver.headers, self._receiver.at_s):
            del kept[: len(kept) - 1]

    def down(self) -> None:
        """Refuse connections from now on."""
        if self._receiver is not None:
            self._receiver.stop()
            self.take()
            self._receiver = None

    def refuse(self, status: int) -> None:
        """Answer with a status of failure from now on."""
        if self._receiver is not None:
            self._receiver.refuse = status

    def up(self) -> None:
        """Take everything again."""
        if self._receiver is None:
            self._receiver = HttpReceiver(self._port)
        self.refused += self._receiver.refused
        self._receiver.refused, self._receiver.refuse = 0, None
