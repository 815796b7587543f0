"""What the store knows of past times: requests of every 10 s by service, samples of the host. See `history`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from whyspan_exporters import schema
from whyspan_exporters.history import FINE_NS, JOINED_NS, Counted, counts_of
from whyspan_exporters.listed import BROKEN
from whyspan_exporters.metrics.states import parse
from whyspan_exporters.records import EXPORTER

_MAX_SAMPLES: Final = 20_000
T = TypeVar("T")


class Sample(NamedTuple):
    """What *instance* said in the 10 s from ``start_unix_ns`` on: JSON-like, as `history.sample` makes it."""

    start_unix_ns: int
    instance: str
    told: dict[str, Any]


class Recall:
    """What `reader.Reader` knows of past times; nothing in a store that no writer of now has opened."""

    def __init__(
        self, db: sqlite3.Connection, errors: Callable[[], AbstractContextManager[None]], version: int
    ) -> None:
        """*errors* turns what SQLite raises into a `StoreError`; *version* is the store's."""
        self._db, self._errors, self._version = db, errors, version

    def requests(
        self, since_unix_ns: int, until_unix_ns: int, step_ns: int, service: str = ""
    ) -> dict[int, Counted]:
        """Return the requests that ended, by step since the beginning; steps without any are left out.

        Args:
            since_unix_ns: The beginning.
            until_unix_ns: The end, not included.
            step_ns: At least `finest_step_ns`, else what is counted together is in the first of its steps.
            service: Only this one; empty: all.

        Raises:
            StoreError: The store cannot be read.
        """
        out: dict[int, Counted] = {}
        one, values = (" AND service = ?", (service,)) if service else ("", ())
        query = (
            "SELECT (start_unix_ns - ?) / ?, requests, failed, latency, ttft FROM intervals"
            f" WHERE start_unix_ns >= ? AND start_unix_ns < ?{one}"
        )
        bounds = (since_unix_ns, step_ns, since_unix_ns, until_unix_ns)
        rows = self._rows(query, (*bounds, *values), tuple[int, int, int, str, str])
        for step, requests, failed, latency, ttft in rows:
            out.setdefault(step, Counted()).add(requests, failed, counts_of(latency), counts_of(ttft))
        return out

    def services(self, since_unix_ns: int, until_unix_ns: int) -> list[str]:
        """Return the services with requests, most requests first.

        Raises:
            StoreError: The store cannot be read.
        """
        query = (
            "SELECT service FROM intervals WHERE start_unix_ns >= ? AND start_unix_ns < ?"
            " GROUP BY service ORDER BY SUM(requests) DESC, service LIMIT 1000"
        )
        rows = self._rows(query, (since_unix_ns, until_unix_ns), tuple[str])
        return [service for (service,) in rows if service]

    def first_unix_ns(self) -> int | None:
        """Return when the first interval begins; None without any.

        Raises:
            StoreError: The store cannot be read.
        """
        rows = self._rows("SELECT MIN(start_unix_ns) FROM intervals", (), tuple[int | None])
        return next(rows, (None,))[0]

    def samples(self, since_unix_ns: int, until_unix_ns: int, step_ns: int) -> Iterator[Sample]:
        """Yield the last sample of each step and instance, collectors and the exporter, in order of time.

        Raises:
            StoreError: The store cannot be read.
        """
        query = (
            "SELECT MAX(start_unix_ns), instance, sample FROM host_samples"
            " WHERE start_unix_ns >= ? AND start_unix_ns < ?"
            " GROUP BY (start_unix_ns - ?) / ?, instance ORDER BY 1 LIMIT ?"
        )
        values = (since_unix_ns, until_unix_ns, since_unix_ns, step_ns, _MAX_SAMPLES)
        for start, instance, text in self._rows(query, values, tuple[int, str, str]):
            try:
                yield Sample(start, instance, msgspec.json.decode(text, type=dict[str, Any]))
            except BROKEN:
                continue

    def said(self, instance: str = "") -> tuple[int, dict[str, Any]]:
        """Return when a collector, or *instance*, last told of itself, and what; 0 and nothing without any.

        Raises:
            StoreError: The store cannot be read.
        """
        which = "instance = ?" if instance else "instance != ?"
        query = (
            f"SELECT updated_unix_ns, status FROM status WHERE {which} ORDER BY updated_unix_ns DESC LIMIT 1"
        )
        with self._errors():
            row = self._db.execute(query, (instance or EXPORTER,)).fetchone()
            told_ns, text = msgspec.convert(row or (0, ""), tuple[int, str])
        return told_ns, parse(text)

    def _rows(self, query: str, values: tuple[object, ...], row_type: type[T]) -> Iterator[T]:
        if self._version < schema.VERSION:
            return
        with self._errors():
            for row in self._db.execute(query, values):
                yield msgspec.convert(row, row_type)


def finest_step_ns(since_unix_ns: int, now_unix_ns: int) -> int:
    """Return the least step in which what was counted since a moment can be shown."""
    return schema.SLOT_NS if since_unix_ns >= now_unix_ns - FINE_NS else JOINED_NS
