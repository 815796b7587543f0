"""Servers for the stitching bench: uvicorn on asyncio (h11 or httptools) and on uvloop.

Answers at once or after the pause that the path asks for (``/v1/wait/MILLISECONDS``), so that requests
overlap and end in another order than they began. ``/healthz`` says that it is up. Both parsers take pipelined
requests and answer them in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from tests.demo.procs import python, set_name, spawn, wait_http

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
#: name -> (event loop, HTTP parser)
KINDS = {
    "asyncio-h11": ("asyncio", "h11"),
    "asyncio": ("asyncio", "httptools"),
    "uvloop": ("uvloop", "httptools"),
}
MAX_PAUSE_MS = 10_000


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Answer with what arrived: the route and the request id."""
    if scope["type"] != "http":
        await _lifespan(receive, send)
        return
    while (await receive()).get("more_body", False):
        pass
    path: str = scope["path"]
    if path.startswith("/v1/wait/"):
        await asyncio.sleep(min(MAX_PAUSE_MS, int(path.rsplit("/", 1)[1])) / 1000)
    request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    body = json.dumps({"path": path, "request_id": request_id}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def start(kind: str, port: int, cpu: int) -> subprocess.Popen[bytes]:
    """Start one server pinned to ``cpu`` and wait until it answers.

    Raises:
        DemoError: it did not come up.
    """
    process = spawn(python("tests.bench.servers", "--kind", kind, "--port", port), cpu)
    wait_http(f"http://127.0.0.1:{port}/healthz", process)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="asyncio")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    set_name(f"bench-{args.kind}")
    loop, http = KINDS[args.kind]
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=args.port,
        loop=loop,
        http=http,
        ws="none",
        access_log=False,
        log_level="error",
        backlog=4096,
        timeout_keep_alive=600,
        # Pipelined requests wait in uvicorn's own queue; nothing is refused.
        limit_concurrency=None,
    )


if __name__ == "__main__":
    main()
