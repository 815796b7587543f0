"""When findings reach the store: it keeps no such time, so it is looked at again and again."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

EVERY_S = 0.05


class Arrivals:
    """Looks at a store's new rows; a time is late by at most EVERY_S and the look itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = 0
        self._db: sqlite3.Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self.seen_ns: dict[str, int] = {}  # by trace id: the latest version of its finding

    async def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._db is not None:
            self._db.close()

    async def _run(self) -> None:
        while True:
            try:
                self._look()
            except sqlite3.Error:
                pass  # not there yet, or busy: the next look will see it
            await asyncio.sleep(EVERY_S)

    def _look(self) -> None:
        if self._db is None:
            if not self._path.exists():
                return
            uri = f"{self._path.absolute().as_uri()}?mode=ro"
            self._db = sqlite3.connect(uri, uri=True, timeout=0.0)
        rows = self._db.execute(
            "SELECT rowid, trace_id FROM findings WHERE rowid > ? ORDER BY rowid", (self._last,)
        ).fetchall()
        now = time.monotonic_ns()
        for rowid, trace in rows:
            self._last = rowid
            self.seen_ns[trace] = now
