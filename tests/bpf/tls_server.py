"""HTTPS servers: ``python -m tests.bpf.tls_server KIND CERTIFICATE KEY`` prints its port.

``loop``: asyncio behind uvicorn, whose TLS is in memory BIOs; ``threads``: http.server, where OpenSSL reads the socket.
``GET /N`` answers with N chunks of five bytes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn

CHUNK = b"abcde"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(int(self.path.partition("?")[0].strip("/"))):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Threads(ThreadingHTTPServer):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._context = context

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the request's own thread, so that a slow handshake holds up nobody else.
        with self._context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)


Message = dict[str, Any]


async def app(
    scope: Message, _receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(scope["path"].strip("/"))):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def main(kind: str, certificate: str, key: str) -> None:
    if kind == "threads":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = Threads(context)
        print(server.server_address[1], flush=True)
        server.serve_forever()
        return
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        app, ssl_certfile=certificate, ssl_keyfile=key, log_level="warning", loop="asyncio", lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
