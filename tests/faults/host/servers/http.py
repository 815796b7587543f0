"""An asyncio server: one event loop, worker threads that make tokens, chunks streamed as server-sent events.

``POST /v1/completions`` with ``{"max_tokens": N, "chunk_bytes": B}`` streams N chunks, one about every 8 ms, of at
least B bytes. Every request and chunk writes a log line *synchronously from the event-loop thread* to standard error,
as many real servers do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from tests.demo.procs import set_name
from tests.demo.server import generate
from tests.faults.host.servers.control import PATH, Control

LOG_LINE_BYTES = 200
COMPLETIONS = "/v1/completions"

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def log(line: str) -> None:
    """Write one line of LOG_LINE_BYTES to standard error; it blocks while nobody reads there."""
    os.write(2, f"{time.time():.6f} INFO {line} ".encode().ljust(LOG_LINE_BYTES - 1, b".") + b"\n")


class Job:
    """One request's tokens, made on a worker and taken by the event loop."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.loop = asyncio.get_running_loop()
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, chunk: bytes) -> None:
        """Hand a chunk over."""
        self.loop.call_soon_threadsafe(self.chunks.put_nowait, chunk)


class Workers:
    """Threads that generate tokens and hand them to the event loop."""

    def __init__(self, count: int, control: Control) -> None:
        self._control = control
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._work, args=(number,), daemon=True).start()

    def submit(self, job: Job) -> None:
        """Let a worker do it."""
        self._jobs.put(job)

    def _work(self, number: int) -> None:
        set_name(f"host-worker-{number}")
        while True:
            job = self._jobs.get()
            self._control.on_worker()
            for index in range(job.tokens):
                job.put(generate(index))


class App:
    """The ASGI application."""

    def __init__(self, control: Control, workers: Workers) -> None:
        self.control = control
        self.workers = workers

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["method"] == "POST" and scope["path"] == COMPLETIONS:
            await self._complete(await read_body(receive), send)
        elif scope["method"] == "POST" and scope["path"] == PATH:
            await answer(send, self.control.switch(await read_body(receive)))
        elif (route := self.control.route(scope["path"])) is not None:
            await answer(send, 200, route())
        else:
            await answer(send, 200 if scope["path"] == "/healthz" else 404)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _complete(self, body: bytes, send: Send) -> None:
        asked = json.loads(body)
        tokens, least = int(asked.get("max_tokens", 8)), int(asked.get("chunk_bytes", 0))
        log(f"request max_tokens={tokens}")
        await self.control.on_loop()
        job = Job(tokens)
        self.workers.submit(job)
        for index in range(tokens):
            chunk = await job.chunks.get()
            if index == 0:
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            log(f"chunk index={index}")
            await send({"type": "http.response.body", "body": padded(chunk, least), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def padded(chunk: bytes, least: int) -> bytes:
    """Return a chunk of at least so many bytes: a comment line of server-sent events is the rest."""
    return chunk if len(chunk) >= least else b":".ljust(least - len(chunk) - 1, b".") + b"\n" + chunk


async def read_body(receive: Receive) -> bytes:
    """Return a request's whole body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    """Send a whole response."""
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


def listen(host: str, port: int, backlog: int, send_buffer: int) -> socket.socket:
    """Return a listening socket; its connections inherit the send buffer."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind((host, port))
    listener.listen(backlog)
    return listener


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--backlog", type=int, default=2048, help="length of the listen queue")
    parser.add_argument(
        "--send-buffer", type=int, default=0, help="of each connection, in bytes; 0: the kernel's"
    )
    parser.add_argument("--certificate", default="", help="of TLS")
    parser.add_argument("--key", default="")
    args = parser.parse_args()
    set_name("host-server")
    control = Control()
    config = uvicorn.Config(
        App(control, Workers(args.workers, control)),
        loop="asyncio",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="error",
        timeout_keep_alive=600,
        backlog=args.backlog,
        ssl_certfile=args.certificate or None,
        ssl_keyfile=args.key or None,
    )
    uvicorn.Server(config).run([listen(args.host, args.port, args.backlog, args.send_buffer)])


if __name__ == "__main__":
    main()
