"""A client that knows the truth: requests with their own trace ids, timed by its own clock."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from tests.demo.truth import Sent

_READ = 1 << 16


class Client:
    """Sends completions to one server and keeps what it saw of the victims'."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pause_s = 0.0  # of victims, after every 64 KiB that they read: slow readers
        self.sent: list[Sent] = []
        self.traces: dict[str, list[str]] = {}  # by label, of requests that are no victims

    async def post(self, path: str, body: Mapping[str, Any]) -> int:
        """Post JSON and return the status."""
        return (await self._exchange(path, body, "0" * 32, None)).status

    async def victim(self, body: Mapping[str, Any]) -> None:
        """Do one request that is judged."""
        self.sent.append(await self._exchange("/v1/completions", body, os.urandom(16).hex(), None, slow=True))

    async def other(
        self, label: str, body: Mapping[str, Any], leave: Callable[[], Awaitable[None]] | None = None
    ) -> Sent:
        """Do one request that is not judged: an attacker's. *leave* returns when its client hangs up."""
        trace = os.urandom(16).hex()
        self.traces.setdefault(label, []).append(trace)
        return await self._exchange("/v1/completions", body, trace, leave)

    async def _connect(self, slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not slow:
            return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=end, limit=_READ)

    async def _exchange(
        self,
        path: str,
        body: Mapping[str, Any],
        trace: str,
        leave: Callable[[], Awaitable[None]] | None,
        *,
        slow: bool = False,
    ) -> Sent:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: lab\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"traceparent: 00-{trace}-{os.urandom(8).hex()}-01\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        start = time.monotonic_ns()
        status, first = 0, 0
        writer = None
        try:
            pause_s = self.pause_s if slow else 0.0
            reader, writer = await self._connect(pause_s > 0)
            writer.write(head.encode() + data)
            await writer.drain()
            read = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
            gone = asyncio.ensure_future(leave()) if leave is not None else None
            if gone is not None:
                await asyncio.wait({read, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    read.cancel()
                    return Sent(trace, start, 0, time.monotonic_ns(), 0, "left")
            status = int((await read).split(b" ", 2)[1])
            while data := await reader.read(_READ):
                first = first or time.monotonic_ns()
                if pause_s:
                    await asyncio.sleep(pause_s)
                if gone is not None and gone.done():
                    return Sent(trace, start, first, time.monotonic_ns(), status, "left")
            return Sent(trace, start, first, time.monotonic_ns(), status, "")
        except (OSError, asyncio.IncompleteReadError) as exc:
            return Sent(trace, start, first, time.monotonic_ns(), status, type(exc).__name__)
        finally:
            if writer is not None:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()


class Steady:
    """Victims at a steady rate, whatever becomes of them: an open loop."""

    def __init__(
        self, client: Client, per_s: Callable[[], float], body: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.client, self.per_s, self.body = client, per_s, body
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            task = asyncio.ensure_future(self.client.victim(self.body()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due += 1 / self.per_s()
            await asyncio.sleep(max(due - time.monotonic(), 0))

    async def stop(self) -> None:
        """Begin no more and wait for those under way."""
        if self._loop is not None:
            self._loop.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=30)
