"""Reads the store for the view, on a thread of its own: the terminal never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from whyspan_exporters.reader import Reader, Stored

from whyspan.views.glance import Glance, glance

T = TypeVar("T")


class Source:
    """A store, asked from the event loop. SQLite wants its connection used by the thread that opened it."""

    def __init__(self, open_reader: Callable[[], Reader], now_unix_ns: Callable[[], int]) -> None:
        """*open_reader* is called on the thread, again after an error."""
        self._open, self._now = open_reader, now_unix_ns
        self._pool = ThreadPoolExecutor(1, "store")
        self._reader: Reader | None = None

    async def glance(self, window_s: int, service: str) -> Glance:
        """Return what is to be seen now.

        Raises:
            StoreError: The store cannot be read.
        """
        return await self._ask(lambda reader: glance(reader, self._now(), window_s, service))

    async def request(self, name: str) -> Stored | None:
        """Return the finding with the id *name*; None when it is gone.

        Raises:
            StoreError: The store cannot be read.
        """
        return await self._ask(lambda reader: reader.get(name))

    def close(self) -> None:
        """Close the store and end the thread."""
        self._pool.submit(self._close)
        self._pool.shutdown()

    async def _ask(self, question: Callable[[Reader], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, question)

    def _answer(self, question: Callable[[Reader], T]) -> T:
        if self._reader is None:
            self._reader = self._open()
        try:
            return question(self._reader)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
