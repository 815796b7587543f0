"""Load on a completions server: an open loop (requests start on schedule) or a closed one (so many at a time).

One JSON line per request on ``--out``: trace_id, span_id, request_id, start_ns, first_ns, end_ns
(CLOCK_MONOTONIC), status, error, prompt_tokens, max_tokens, chunks. This clock, not the agent's, decides what was
slow. Raw sockets and a minimal parser keep the client light.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import signal
import time
from typing import IO

TIMEOUT_S = 30.0


class Connection(asyncio.Protocol):
    """One keep-alive connection that carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self.buffer = bytearray()
        self.status = 0
        self.first_ns = 0
        self.end_ns = 0
        self.chunks = 0
        self.length = -1  # of the body, when it is announced
        self.closing = False
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.done and not self.done.done():
            self.done.set_exception(exc or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.buffer += data
        if not self.status:
            head_end = self.buffer.find(b"\r\n\r\n")
            if head_end < 0:
                return
            self._head(bytes(self.buffer[:head_end]))
            del self.buffer[: head_end + 4]
        if self.buffer and not self.first_ns:
            self.first_ns = now
        if self.length >= 0:
            if len(self.buffer) >= self.length and self.done and not self.done.done():
                self.end_ns = now
                self.done.set_result(None)
            return
        while self._take_chunk():
            if self.end_ns and self.done and not self.done.done():
                self.done.set_result(None)

    def _head(self, head: bytes) -> None:
        self.status = int(head[9:12])
        for line in head.lower().split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"content-length":
                self.length = int(value)
            self.closing = self.closing or (name == b"connection" and b"close" in value)

    def _take_chunk(self) -> bool:
        line_end = self.buffer.find(b"\r\n")
        if line_end < 0:
            return False
        size = int(self.buffer[:line_end], 16)
        if len(self.buffer) < line_end + size + 4:
            return False
        del self.buffer[: line_end + size + 4]
        if size == 0:
            self.end_ns = time.monotonic_ns()
        else:
            self.chunks += 1
        return True

    async def request(self, head: bytes) -> None:
        """Send a request and wait for the end of its response.

        Raises:
            ConnectionError: the connection was closed before the end.
            TimeoutError: no end after TIMEOUT_S.
        """
        self._reset()
        if self.transport is None:
            raise ConnectionError("closed")
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(head)
        await asyncio.wait_for(self.done, TIMEOUT_S)


Range = tuple[int, int]


def body(args: argparse.Namespace, prompt_tokens: int, max_tokens: int) -> dict[str, object]:
    """The request's JSON: of a real engine, which wants token ids and would stop early, or of the demo's server."""
    if args.api == "demo":
        return {"model": "demo", "prompt": "hello", "max_tokens": max_tokens, "stream": True}
    prompt = [random.randrange(3, 1000) for _ in range(prompt_tokens)]
    return {
        "model": args.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class Load:
    """The schedule, the pool of idle connections and the output."""

    def __init__(self, args: argparse.Namespace, out: IO[str]) -> None:
        self.args = args
        self.out = out
        self.idle: list[Connection] = []
        self.sent = 0

    async def connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, "127.0.0.1", self.args.port
        )
        return connection

    async def one(self) -> None:
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        request_id = f"req-{secrets.token_hex(6)}"
        prompt_tokens, max_tokens = (
            random.randint(*self.args.prompt_tokens),
            random.randint(*self.args.tokens),
        )
        payload = json.dumps(body(self.args, prompt_tokens, max_tokens))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.args.port}\r\n"
            "content-type: application/json\r\n"
            f"traceparent: 00-{trace_id}-{span_id}-01\r\nx-request-id: {request_id}\r\n"
            f"content-length: {len(payload)}\r\n\r\n{payload}"
        )
        error, start_ns, connection = "", time.monotonic_ns(), None
        self.sent += 1
        try:
            connection = self.pooled() or await self.connect()
            await connection.request(head.encode())
            if not connection.closing:
                self.idle.append(connection)
        except (OSError, TimeoutError) as exc:
            error = repr(exc)
        record = {
            "trace_id": trace_id,
            "span_id": span_id,
            "request_id": request_id,
            "start_ns": start_ns,
            "first_ns": connection.first_ns if connection else 0,
            "end_ns": (connection.end_ns if connection else 0) or time.monotonic_ns(),
            "status": connection.status if connection else 0,
            "error": error,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "chunks": connection.chunks if connection else 0,
        }
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()

    def pooled(self) -> Connection | None:
        """The oldest idle connection that the server has not closed, so that all are used and few time out."""
        while self.idle:
            connection = self.idle.pop(0)
            if connection.transport is not None:
                return connection
        return None

    async def open_loop(self, rate: float, stop: asyncio.Event) -> None:
        """Send ``rate`` requests/s, gaps uniform within 40% of the mean, until ``stop`` is set."""
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while not stop.is_set() and not self.enough():
            task = asyncio.create_task(self.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += random.uniform(0.6, 1.4) / rate
            try:
                await asyncio.wait_for(stop.wait(), max(0.0, due - time.monotonic()))
            except TimeoutError:
                continue
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    async def closed_loop(self, clients: int, stop: asyncio.Event) -> None:
        """Keep ``clients`` requests in flight until ``stop`` is set; those in flight then are finished."""

        async def client() -> None:
            while not stop.is_set() and not self.enough():
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))

    def enough(self) -> bool:
        return bool(self.args.requests) and self.sent >= self.args.requests

    async def run(self, stop: asyncio.Event) -> None:
        self.idle = [await self.connect() for _ in range(self.args.connections)]
        if self.args.closed:
            await self.closed_loop(self.args.closed, stop)
        else:
            await self.open_loop(self.args.rate, stop)


async def amain(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if args.seconds:
        loop.call_later(args.seconds, stop.set)
    with open(args.out, "w", encoding="utf-8") as out:
        await Load(args, out).run(stop)


def span(text: str) -> Range:
    """Parse ``12`` or ``8:16``."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second, in an open loop")
    parser.add_argument(
        "--closed", type=int, default=0, metavar="N", help="a closed loop of N clients instead"
    )
    parser.add_argument("--tokens", type=span, default=(12, 12), metavar="N|LO:HI", help="output tokens")
    parser.add_argument("--prompt-tokens", type=span, default=(1, 1), metavar="N|LO:HI")
    parser.add_argument("--api", choices=["demo", "vllm"], default="demo", help="whose request body")
    parser.add_argument("--model", default="demo", help="the model's served name")
    parser.add_argument("--connections", type=int, default=32, help="keep-alive connections opened first")
    parser.add_argument("--seconds", type=float, default=0.0, help="0: until SIGTERM")
    parser.add_argument("--requests", type=int, default=0, help="end after so many; 0: no limit")
    parser.add_argument("--out", required=True)
    asyncio.run(amain(parser.parse_args()))


if __name__ == "__main__":
    main()
