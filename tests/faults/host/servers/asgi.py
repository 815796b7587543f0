"""An ASGI middleware that gives a real vLLM the switch for faults, and a log line per request.

Runs inside vLLM's API server, in its environment: the standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from tests.faults.host.servers.control import PATH, Control

#: Bytes of the line that every request writes to the standard error, as access logs with all headers do.
LOG_BYTES = 1000


class Faults:
    """Lets the faults that are on act on the event loop before each completion."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app
        self._control = Control()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == PATH:
            await _answer(send, self._control.switch(await _body(receive)))
            return
        if scope["type"] == "http" and (route := self._control.route(scope["path"])) is not None:
            await _answer(send, 200, route())
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            sys.stderr.write(f"request {scope['path']} ".ljust(LOG_BYTES - 1, ".") + "\n")
            await self._control.on_loop()
        await self._app(scope, receive, send)


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Any, status: int, body: bytes = b"") -> None:
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})
