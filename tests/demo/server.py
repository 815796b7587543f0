"""A small LLM-like streaming server: one event loop, one worker thread per request, tokens as SSE chunks.

``POST /v1/completions`` with ``{"max_tokens": N}`` streams N chunks, one about every 8 ms. Every request and
every chunk writes a log line of about 200 bytes *synchronously from the event-loop thread* to the log
descriptor, as many real servers do. SIGUSR1 switches a synchronous CPU burst per request on, SIGUSR2 off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from tests.demo.procs import set_name
from tests.engine.middleware import burn

TOKEN_SECONDS = 0.008
TOKEN_CPU_SECONDS = 0.0002
BURST_S = 0.120
LOG_LINE_BYTES = 200

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Job = tuple[int, asyncio.AbstractEventLoop, "asyncio.Queue[bytes]"]


def generate(index: int) -> bytes:
    """One token: sleep as if a device worked, then a little Python."""
    time.sleep(TOKEN_SECONDS)
    total, end = 0, time.thread_time() + TOKEN_CPU_SECONDS
    while time.thread_time() < end:
        total += index
    return b'data: {"choices":[{"index":0,"text":" token%d"}]}\n\n' % index


class Workers:
    """Worker threads that generate tokens and hand them to the event loop."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._work, args=(number,), daemon=True).start()

    def submit(self, tokens: int, chunks: asyncio.Queue[bytes]) -> None:
        self._jobs.put((tokens, asyncio.get_running_loop(), chunks))

    def _work(self, number: int) -> None:
        set_name(f"demo-worker-{number}")
        while True:
            tokens, loop, chunks = self._jobs.get()
            for index in range(tokens):
                loop.call_soon_threadsafe(chunks.put_nowait, generate(index))


class App:
    """The ASGI application."""

    def __init__(self, log_fd: int, workers: Workers) -> None:
        self.log_fd = log_fd
        self.workers = workers
        self.burst = False

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["method"] == "POST" and scope["path"] == "/v1/completions":
            await self._complete(scope, receive, send)
        else:
            status = 200 if scope["path"] == "/healthz" else 404
            await send(
                {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]}
            )
            await send({"type": "http.response.body", "body": b""})

    def log(self, line: str) -> None:
        """Write one line of LOG_LINE_BYTES. It blocks the loop while the pipe is full: that is the point."""
        os.write(
            self.log_fd, f"{time.time():.6f} INFO {line} ".encode().ljust(LOG_LINE_BYTES - 1, b".") + b"\n"
        )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                loop.add_signal_handler(signal.SIGUSR1, setattr, self, "burst", True)
                loop.add_signal_handler(signal.SIGUSR2, setattr, self, "burst", False)
                await send({"type": "lifespan.startup.complete"})
            else:
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _complete(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        tokens = int(json.loads(body).get("max_tokens", 16))
        request_id = dict(scope["headers"]).get(b"x-request-id", b"-").decode("latin-1")
        self.log(f"request {request_id} max_tokens={tokens}")
        if self.burst:
            burn(BURST_S)
        chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.workers.submit(tokens, chunks)
        for index in range(tokens):
            chunk = await chunks.get()
            if index == 0:
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.log(f"chunk {request_id} index={index}")
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--log-fd", type=int, default=2, help="descriptor of the log; the demo makes it a 4 KiB pipe"
    )
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--workers", type=int, default=64)
    args = parser.parse_args()
    set_name("demo-server")
    uvicorn.run(
        App(args.log_fd, Workers(args.workers)),
        host="127.0.0.1",
        port=args.port,
        loop=args.loop,
        http="httptools",
        ws="none",
        access_log=False,
        log_level="error",
        timeout_keep_alive=600,
    )


if __name__ == "__main__":
    main()
