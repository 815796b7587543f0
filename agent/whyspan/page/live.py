"""Tells open pages that the store has something newer, by server-sent events; the page then asks again.

One look at the store a second, however many pages are open, and none without any.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from whyspan.page.answer import problem

#: s between two looks at the store.
INTERVAL_S: Final = 1.0
#: s after which a comment is sent when there is nothing to say: a proxy ends a silent connection after a minute.
_PING_S: Final = 15.0
_MOST: Final = 32  # open pages
_HELLO: Final = b"retry: 3000\n: listening\n\n"
_PING: Final = b": nothing new\n\n"


class Live:
    """Watches the store while somebody listens.

    An event's data is ``requests`` when the newest request is another one, else ``status``: figures of the agent.
    """

    def __init__(self, store: Path, ending: Callable[[], bool], interval_s: float = INTERVAL_S) -> None:
        """Name the *store*; *ending* says that the server is about to stop."""
        self._ending, self._interval_s = ending, interval_s
        self._watch = _Watch(store)
        self._queues: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, _request: Request) -> Response:
        """Answer with a stream of events."""
        if len(self._queues) >= _MOST:
            return problem(429, f"{_MOST} pages listen already", {"retry-after": "30"})
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[bytes]:
        # Who does not read in time misses nothing: one event says as much as two.
        queue: asyncio.Queue[bytes] = asyncio.Queue(2)
        self._queues.add(queue)
        if self._task is None:
            self._watch.news()  # what is there now is none
            self._task = asyncio.create_task(self._run())
        try:
            yield _HELLO
            while event := await queue.get():
                yield event
        finally:
            self._queues.discard(queue)
            if not self._queues and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        said = loop.time()
        try:
            while not self._ending():
                await asyncio.sleep(self._interval_s)
                news = self._watch.news()
                event = f"data: {news}\n\n".encode() if news else b""
                if not news and loop.time() - said > _PING_S:
                    event = _PING
                if event:
                    said = loop.time()
                    self._tell(event)
            self._tell(b"")
        finally:
            self._watch.close()

    def _tell(self, event: bytes) -> None:
        for queue in self._queues:
            if queue.full() and (not event or b"requests" in event):
                queue.get_nowait()
            if not queue.full():
                queue.put_nowait(event)


class _Watch:
    """Says what is new in a store since the last look; for one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] = (0, 0)
        self._version = self._newest = -1

    def close(self) -> None:
        """Close the file; the next look opens it again."""
        if self._db is not None:
            self._db.close()
        self._db = None

    def news(self) -> str:
        """Return ``requests``, ``status`` or nothing."""
        try:
            stat = self._path.stat()
            if self._db is None or (stat.st_dev, stat.st_ino) != self._file:
                self.close()
                self._db = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.1)
                self._file, self._version = (stat.st_dev, stat.st_ino), -1
            # Another connection has committed when this number is another; it is read without a look at the tables.
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return ""
            (newest,) = self._db.execute("SELECT COALESCE(MAX(rowid), 0) FROM findings").fetchone()
        except (OSError, sqlite3.Error):  # none yet, or it is being made anew: the next look may do
            self.close()
            return ""
        news = "requests" if newest != self._newest else "status"
        self._version, self._newest = version, newest
        return news
