"""The local store's reader for questions about very many requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from whyspan_exporters.listed import int64
from whyspan_exporters.reader import Reader


class Raw(NamedTuple):
    """A finding as stored: msgpack of ``model.Finding``, for a caller that needs few of its fields."""

    id: str
    start_unix_ns: int
    finding: bytes


class BulkReader(Reader):
    """Questions that read a good part of the store."""

    def raw(self, *, since_unix_ns: int, until_unix_ns: int, limit: int, service: str = "") -> Iterator[Raw]:
        """Yield up to *limit* findings of a time, newest first. They are read as they are taken.

        Args:
            since_unix_ns: Only requests that started at or after this time.
            until_unix_ns: Only requests that started before this time.
            limit: At most so many.
            service: Only this service; empty: all.

        Raises:
            StoreError: The store cannot be read.
        """
        where = "start_unix_ns >= ? AND start_unix_ns < ?" + " AND service = ?" * bool(service)
        values = [int64(since_unix_ns), int64(until_unix_ns), *[service] * bool(service), limit]
        query = f"SELECT id, start_unix_ns, finding FROM findings WHERE {where} ORDER BY start_unix_ns DESC LIMIT ?"
        with self._errors():
            for row in self._db.execute(query, values):
                yield msgspec.convert(row, Raw)
