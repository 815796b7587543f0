"""ASGI middlewares for vLLM's ``--middleware``: a log line and a CPU burst per request; a broken abort path.

Runs inside vLLM's API server, in its environment: the standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

#: Names the file; it holds the burst's length in seconds, and its absence means none.
SWITCH = "WHYSPAN_TEST_BURST_FILE"
#: Bytes of the line that every request writes to the standard error, as access logs with all headers do.
LOG_BYTES = 1000

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


def burn(seconds: float) -> int:
    """Spend that much of this thread's CPU time in the JSON encoder, as a slow chat template does."""
    prompt = {"messages": [{"role": "user", "content": f"word {i} " * 8} for i in range(20)]}
    size, end = 0, time.thread_time() + seconds
    while time.thread_time() < end:
        size += len(json.dumps(prompt))
    return size


class Burst:
    """Logs every completion, and delays it by what the file says, on the event loop."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.path = os.environ.get(SWITCH, "")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            sys.stderr.write(f"request {scope['path']} ".ljust(LOG_BYTES - 1, ".") + "\n")
            try:
                with open(self.path, encoding="ascii") as file:
                    burn(float(file.read()))
            except (OSError, ValueError):
                pass
        await self.app(scope, receive, send)


#: Names a file; while it exists nothing in the server hears that a client has left.
DEAF = "WHYSPAN_TEST_DEAF"


class Deaf:
    """An abort path that is broken: disconnects are not passed on."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not Path(os.environ[DEAF]).exists():
            await self._app(scope, receive, send)
            return

        async def hear() -> Any:
            event = await receive()
            while event["type"] == "http.disconnect":
                await asyncio.sleep(3600)
            return event

        await self._app(scope, hear, send)
