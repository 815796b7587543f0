"""The Prometheus endpoint: one thread, few connections, one request each, and nobody is waited for.

No TLS and no passwords: it listens on the loopback interface unless told otherwise, and what it says is no secret of a
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from whyspan_exporters.metrics import http
from whyspan_exporters.metrics.http import MAX_HEAD

log = logging.getLogger("whyspan.prometheus")

MAX_CONNECTIONS: Final = 16
_READ_S: Final = 5.0
_WRITE_S: Final = 10.0
#: Scrapes that come closer together see the same page.
_PAGE_S: Final = 1.0
_JOIN_S: Final = 1.0
_BACKLOG: Final = 16

#: Makes the page: (Accept) -> (text, content type).
Render = Callable[[str], tuple[bytes, str]]


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: The address is in use, is not this host's, or may not be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class Endpoint:
    """Serves until `close`. ``answered`` and ``refused`` count requests."""

    def __init__(self, listener: socket.socket, render: Render) -> None:
        """Start the thread; *render* is called in it. Takes *listener* over."""
        self.answered = self.refused = 0
        self._listener, self._render = listener, render
        self._open = 0
        self._broken = False
        self._pages: dict[tuple[bool, bool], tuple[float, tuple[bytes, str]]] = {}  # by format, packed
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="whyspan-prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end; answers on their way are cut off."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("the endpoint has failed")
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=MAX_HEAD)
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                self.refused += 1
                return
            response = await self._respond(reader)
            async with asyncio.timeout(_WRITE_S):
                writer.write(response)
                await writer.drain()
                writer.write_eof()
                # A close with something unread would reset the connection, and the answer with it.
                while await reader.read(MAX_HEAD):
                    pass
        except (OSError, TimeoutError):
            pass  # the client's affair
        finally:
            self._open -= 1
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(_READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            self.refused += 1
            return http.refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except asyncio.IncompleteReadError as exc:
            self.refused += 1
            return http.refusal(HTTPStatus.BAD_REQUEST) if exc.partial else b""
        except TimeoutError:
            self.refused += 1
            return http.refusal(HTTPStatus.REQUEST_TIMEOUT)
        try:
            response = http.answer(head, self._page)
        except Exception:
            # A defect of ours; the next page may do.
            if not self._broken:
                log.exception("prometheus: no metrics this time")
            self._broken = True
            response = http.refusal(HTTPStatus.INTERNAL_SERVER_ERROR)
        if response.startswith(b"HTTP/1.1 200 "):
            self.answered += 1
        else:
            self.refused += 1
        return response

    def _page(self, accept: str, packed: bool) -> tuple[bytes, str]:
        key = "openmetrics" in accept, packed
        at_s, page = self._pages.get(key, (float("-inf"), (b"", "")))
        now_s = time.monotonic()
        if now_s - at_s >= _PAGE_S:
            text, content_type = self._render(accept)
            page = (http.pack(text) if packed else text), content_type
            self._pages[key] = now_s, page
        return page
