"""The client of the host bench: an open loop of victims, timed by its own clock, which is the truth.

What a body holds under ``client`` is for the client and is not sent: ``pause_s`` after every read and
``receive_buffer`` make a slow reader; ``keep_alive`` lets victims share connections; ``queue_s`` (least and most) holds
a request back and says in its head when it began; ``upload_s`` lets its body take so long.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from tests.demo.truth import Sent

COMPLETIONS = "/v1/completions"
CAP_S = 30.0
PIECES = 4  # of a body that is sent slowly
_READ = 1 << 16

_T = TypeVar("_T")
_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ClientLoop:
    """An event loop on a thread of its own: what a fault does must not delay the clock that is the truth."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
        self._thread.start()

    async def do(self, what: Coroutine[Any, Any, _T]) -> _T:
        """Run something there and wait for it, on the caller's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(what, self._loop))

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HostClient:
    """Requests to one server. ``sent``: of the victims, in order of their ends; ``others``: trace ids of the rest."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.host, self.port = host, port
        self.sent: list[Sent] = []
        self.others: list[str] = []
        self._tls = tls
        self._idle: list[_Ends] = []

    async def victim(self, body: Mapping[str, Any]) -> None:
        """Do one request that is judged."""
        self.sent.append(await self._send(COMPLETIONS, body, os.urandom(16).hex()))

    async def other(self, body: Mapping[str, Any]) -> Sent:
        """Do one completion that is not judged."""
        self.others.append(trace := os.urandom(16).hex())
        return await self._send(COMPLETIONS, body, trace)

    async def post(self, path: str, body: Mapping[str, Any]) -> int:
        """Post JSON and return the status, 0 when there was none."""
        return (await self._send(path, body, os.urandom(16).hex())).status

    async def _send(self, path: str, body: Mapping[str, Any], trace: str) -> Sent:
        how = dict(body.get("client", {}))
        data = json.dumps({k: v for k, v in body.items() if k != "client"}).encode()
        began = f"x-request-start: t={time.time():.6f}\r\n" if "queue_s" in how else ""
        keep = bool(how.get("keep_alive"))
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"connection: {'keep-alive' if keep else 'close'}\r\n"
            f"traceparent: 00-{trace}-{os.urandom(8).hex()}-01\r\n{began}content-length: {len(data)}\r\n\r\n"
        )
        seen = _Seen(trace, time.monotonic_ns())
        try:
            async with asyncio.timeout(CAP_S):
                if "queue_s" in how:
                    await asyncio.sleep(random.uniform(*how["queue_s"]))
                await self._exchange(head.encode() + data, how, keep, seen)
        except (OSError, EOFError, ValueError, TimeoutError) as exc:
            seen.error = type(exc).__name__
        return seen.sent(time.monotonic_ns())

    async def _exchange(self, data: bytes, how: Mapping[str, Any], keep: bool, seen: _Seen) -> None:
        reader, writer = self._idle.pop(0) if keep and self._idle else await self._connect(how)
        whole = False
        try:
            await _write(writer, data, float(how.get("upload_s", 0)))
            length = await _head(reader, seen)
            if keep:
                await _body(reader, length, seen)
                whole = True
            else:
                while await reader.read(_READ):
                    seen.first_ns = seen.first_ns or time.monotonic_ns()
                    if pause_s := how.get("pause_s"):
                        await asyncio.sleep(float(pause_s))
        finally:
            if whole:
                self._idle.append((reader, writer))
            else:
                writer.close()
                with suppress(OSError, asyncio.CancelledError):
                    await writer.wait_closed()

    async def _connect(self, how: Mapping[str, Any]) -> _Ends:
        end = socket.socket()
        end.setblocking(False)
        limit = 1 << 22
        if buffer := how.get("receive_buffer"):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(buffer))
            limit = _READ
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(end, (self.host, self.port))
        except BaseException:
            end.close()
            raise
        more: dict[str, Any] = {"ssl": self._tls, "server_hostname": self.host} if self._tls else {}
        return await asyncio.open_connection(sock=end, limit=limit, **more)

    async def close(self) -> None:
        """Close what is kept."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


class _Seen:
    def __init__(self, trace: str, start_ns: int) -> None:
        self.trace, self.start_ns = trace, start_ns
        self.first_ns = self.status = 0
        self.error = ""

    def sent(self, end_ns: int) -> Sent:
        return Sent(self.trace, self.start_ns, self.first_ns, end_ns, self.status, self.error)


async def _write(writer: asyncio.StreamWriter, data: bytes, upload_s: float) -> None:
    """Send a request; with *upload_s* its body in pieces over that time."""
    if upload_s:
        end = data.index(b"\r\n\r\n") + 4
        size = max((len(data) - end + PIECES - 1) // PIECES, 1)
        writer.write(data[:end])
        for at in range(end, len(data), size):
            await writer.drain()
            await asyncio.sleep(upload_s / PIECES)
            writer.write(data[at : at + size])
    else:
        writer.write(data)
    await writer.drain()


async def _head(reader: asyncio.StreamReader, seen: _Seen) -> int:
    """Read the response's head; return the body's length, -1 when it comes in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    seen.status = int(head.split(b" ", 2)[1])
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return -1


async def _body(reader: asyncio.StreamReader, length: int, seen: _Seen) -> None:
    if length >= 0:
        await reader.readexactly(length)
        return
    while size := int(await reader.readline(), 16):
        seen.first_ns = seen.first_ns or time.monotonic_ns()
        await reader.readexactly(size + 2)
    await reader.readline()


class Steady:
    """Victims at a steady rate, whatever becomes of them: an open loop."""

    def __init__(self, client: HostClient, per_s: float, body: Callable[[], Mapping[str, Any]]) -> None:
        self.client, self.per_s, self.body = client, per_s, body
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin."""
        self._loop = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            task = asyncio.ensure_future(self.client.victim(self.body()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due += 1 / self.per_s
            await asyncio.sleep(max(due - time.monotonic(), 0))

    async def stop(self) -> None:
        """Begin no more, and wait for those under way."""
        if self._loop is not None:
            self._loop.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CAP_S)
        await self.client.close()
