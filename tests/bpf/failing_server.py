"""A uvicorn server whose requests fail on demand: ``python -m tests.bpf.failing_server``, which prints its port.

``/status/N`` answers N; ``/stream/N`` sends N chunks, one every 10 ms; ``/hang`` never answers; ``/block/MS``
keeps the event loop from running; ``/work/MS`` has a worker thread burn so much CPU time; ``/child`` asks a child
process that never answers and gives 500 when that is gone; ``/child/hang`` asks it and does not notice its end;
``/exit/N`` ends the process with that status.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from tests.demo.procs import set_name

Send = Callable[[dict[str, Any]], Awaitable[None]]
CHUNK_S = 0.01


def burn(seconds: float) -> None:
    """Spend so much CPU time of this thread."""
    set_name("burner")
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class App:
    """The ASGI application, and its child."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    async def __call__(self, scope: dict[str, Any], _receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        what, _, how = scope["path"][1:].partition("/")
        await getattr(self, f"on_{what}")(how, send)

    async def on_status(self, how: str, send: Send) -> None:
        await self._answer(int(how), send)

    async def on_stream(self, how: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(int(how)):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % i, "more_body": True})
            await asyncio.sleep(CHUNK_S)
        await send({"type": "http.response.body"})

    async def on_hang(self, _how: str, send: Send) -> None:
        await asyncio.sleep(600)
        await self._answer(200, send)

    async def on_block(self, how: str, send: Send) -> None:
        time.sleep(int(how) / 1000)
        await self._answer(200, send)

    async def on_work(self, how: str, send: Send) -> None:
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def work() -> None:
            burn(int(how) / 1000)
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, daemon=True).start()
        await done.wait()
        await self._answer(200, send)

    async def on_child(self, how: str, send: Send) -> None:
        if how == "hang":
            await asyncio.sleep(600)
        out = self.child.stdout
        assert out is not None
        answer = await asyncio.get_running_loop().run_in_executor(None, os.read, out.fileno(), 1)
        await self._answer(200 if answer else 500, send)

    async def on_exit(self, how: str, _send: Send) -> None:
        os._exit(int(how))

    async def _answer(self, status: int, send: Send) -> None:
        bodyless = status in (204, 304)
        headers = [] if bodyless else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if bodyless else b"ok"})


class Server(uvicorn.Server):
    """Prints its port and its child's number when it listens."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        app = self.config.app
        assert isinstance(app, App)
        print(json.dumps({"port": port, "child": app.child.pid}), flush=True)


def main() -> None:
    """Serve until killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    config = uvicorn.Config(App(), port=0, log_level="critical", http="h11", loop="asyncio", lifespan="off")
    Server(config).run()


if __name__ == "__main__":
    main()
