"""Lists of requests: filtered, sorted and cut into pages by SQLite, without reading a finding."""

from __future__ import annotations

import base64
import binascii
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec
from whyspan.errors import QueryError

from whyspan_exporters import listed, schema
from whyspan_exporters.filters import Filter
from whyspan_exporters.listed import COLUMNS, Listed
from whyspan_exporters.metrics.states import number

#: What a list can be sorted by, and the expression that does it. A request without a first byte comes before all.
SORTS: Final[Mapping[str, str]] = {
    "start": "start_unix_ns",
    "latency": "latency_ns",
    "ttft": "COALESCE(ttft_ns, -1)",
    "excess": "excess_ms",
    "share": "share",
    "confidence": "confidence",
    "status": "status",
    "service": "service",
    "route": "route",
    "cause": "cause",
    "culprit": "culprit",
    "phase": "phase",
}
#: What `Listing.facets` counts: fields of `Filter`, which are columns.
FACETS: Final = ("service", "cause", "culprit", "tenant", "model", "route")
ORDERS: Final = ("desc", "asc")
MAX_LIMIT: Final = 10_000
MAX_CURSOR: Final = 2000
#: Rows that are counted together: far more than there are steps of a chart times causes.
_MAX_GROUPS: Final = 100_000
_MAX_SERVICES: Final = 1000


class ListedPage(NamedTuple):
    """A page of a list, how many requests there are in all, and where the next page begins: "" at the end."""

    rows: list[Listed]
    total: int
    cursor: str


class Listing:
    """What `reader.Reader` knows of lists."""

    def __init__(
        self, db: sqlite3.Connection, errors: Callable[[], AbstractContextManager[None]], version: int
    ) -> None:
        """*errors* turns what SQLite raises into a `StoreError`; *version* is the store's."""
        self._db, self._errors = db, errors
        self._table = "requests"
        if version < schema.VERSION:  # no writer has made it yet: in memory, as long as this reader lives
            self._table = "temp.requests"
            with errors():
                db.execute("PRAGMA temp_store = MEMORY")
                db.execute(schema.REQUESTS.replace("CREATE TABLE", "CREATE TEMP TABLE"))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._errors():
            if self._table != "requests":
                self._db.execute(f"DELETE FROM {self._table} WHERE id NOT IN (SELECT id FROM findings)")
                listed.fill(self._db, self._table)
            yield

    def page(
        self,
        wanted: Filter,
        *,
        sort: str = "start",
        order: str = "desc",
        limit: int = 100,
        cursor: str = "",
        count: bool = True,
    ) -> ListedPage:
        """Return a page of the list.

        Args:
            wanted: Which requests.
            sort: One of `SORTS`; those of the same value are sorted by their start, then by their id.
            order: desc or asc.
            limit: Rows at most, up to `MAX_LIMIT`.
            cursor: Of the page before; empty: the first page.
            count: Whether the total is wanted; 0 without.

        Raises:
            QueryError: No such sort or order, or a cursor that is none, or one of another sort or order.
            StoreError: The store cannot be read.
        """
        if sort not in SORTS:
            raise QueryError(f"sort: {sort[:40]!r} is none of {', '.join(SORTS)}")
        if order not in ORDERS:
            raise QueryError(f"order: {order[:40]!r} is none of {', '.join(ORDERS)}")
        limit = max(1, min(limit, MAX_LIMIT))
        where, values = wanted.where()
        key = list(dict.fromkeys((SORTS[sort], "start_unix_ns", "id")))
        after, at = "", list[object]()
        if cursor:
            at = _read_cursor(cursor, sort, order, len(key))
            after = f" AND ({', '.join(key)}) {'<' if order == 'desc' else '>'} ({','.join('?' * len(key))})"
        by = ", ".join(f"{column} {order}" for column in key)
        query = (
            f"SELECT {COLUMNS}, {SORTS[sort]} FROM {self._table} WHERE {where}{after} ORDER BY {by} LIMIT ?"
        )
        total = 0
        with self._reading():
            found = self._db.execute(query, (*values, *at, limit + 1)).fetchall()
            rows = msgspec.convert([row[:-1] for row in found[:limit]], list[Listed])
            if count:
                counted = f"SELECT COUNT(*) FROM {self._table} WHERE {where}"
                (total,) = self._db.execute(counted, values).fetchone()
        if len(found) <= limit:
            return ListedPage(rows, total, "")
        last = rows[-1]
        place = [found[limit - 1][-1], last.start_unix_ns, last.id][-len(key) :]
        return ListedPage(rows, total, _cursor(sort, order, place))

    def get(self, name: str) -> Listed | None:
        """Return the row of the finding with the id *name*; None when there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        if not listed.is_text(name):
            return None
        with self._reading():
            query = f"SELECT {COLUMNS} FROM {self._table} WHERE id = ?"
            row = self._db.execute(query, (name,)).fetchone()
            return msgspec.convert(row, Listed) if row else None

    def facets(self, wanted: Filter, limit: int = 50) -> dict[str, list[str]]:
        """Return by each of `FACETS` its values, most frequent first, without empty ones.

        Each is of the requests that all other conditions of *wanted* leave: one that is chosen can be changed.

        Raises:
            StoreError: The store cannot be read.
        """
        out = {}
        with self._reading():
            for name in FACETS:
                rest: dict[str, Any] = {name: ""}
                where, values = replace(wanted, **rest).where()
                query = (
                    f"SELECT {name} FROM {self._table} WHERE {where} AND {name} != ''"
                    f" GROUP BY {name} ORDER BY COUNT(*) DESC, {name} LIMIT ?"
                )
                found = self._db.execute(query, (*values, limit)).fetchall()
                out[name] = [value for (value,) in msgspec.convert(found, list[tuple[str]])]
        return out

    def by_step(self, wanted: Filter, step_ns: int) -> list[tuple[int, str, int, float]]:
        """Return (step since ``since_unix_ns``, cause, requests, ms of excess) of those that are slow or failed.

        Raises:
            StoreError: The store cannot be read.
        """
        where, values = replace(wanted, ordinary=False).where()
        query = (
            "SELECT (start_unix_ns - ?) / ?, cause, COUNT(*), TOTAL(MAX(excess_ms, 0))"
            f" FROM {self._table} WHERE {where} GROUP BY 1, 2 LIMIT {_MAX_GROUPS}"
        )
        with self._reading():
            rows = self._db.execute(query, (wanted.since_unix_ns, step_ns, *values)).fetchall()
            found = msgspec.convert(rows, list[tuple[int, str, int, float]])
        return [(step, cause, n, number(ms) or 0.0) for step, cause, n, ms in found]

    def by_latency(self, wanted: Filter, bounds_ns: Sequence[int]) -> list[tuple[int, str, int]]:
        """Return (bucket, cause, requests) of those that are slow or failed; a bound belongs to the bucket below it.

        Raises:
            StoreError: The store cannot be read.
        """
        where, values = replace(wanted, ordinary=False).where()
        cases = " ".join(f"WHEN latency_ns <= {int(bound)} THEN {i}" for i, bound in enumerate(bounds_ns))
        query = (
            f"SELECT CASE {cases} ELSE {len(bounds_ns)} END, cause, COUNT(*)"
            f" FROM {self._table} WHERE {where} GROUP BY 1, 2 LIMIT {_MAX_GROUPS}"
        )
        with self._reading():
            rows = self._db.execute(query, values).fetchall()
            return msgspec.convert(rows, list[tuple[int, str, int]])

    def totals(self, wanted: Filter) -> tuple[int, int]:
        """Return how many requests are slow, and how many failed.

        Raises:
            StoreError: The store cannot be read.
        """
        where, values = replace(wanted, ordinary=False).where()
        query = (
            f"SELECT TOTAL(slow & {schema.SLOW_BIT} > 0), TOTAL(slow & {schema.FAILED_BIT} > 0)"
            f" FROM {self._table} WHERE {where}"
        )
        with self._reading():
            slow, failed = self._db.execute(query, values).fetchone()
            return int(slow), int(failed)

    def services(self, since_unix_ns: int = 0) -> list[str]:
        """Return the services of which there are findings.

        Raises:
            StoreError: The store cannot be read.
        """
        query = f"SELECT DISTINCT service FROM {self._table} WHERE start_unix_ns >= ? ORDER BY 1 LIMIT ?"
        with self._reading():
            rows = self._db.execute(query, (since_unix_ns, _MAX_SERVICES)).fetchall()
            return [service for (service,) in msgspec.convert(rows, list[tuple[str]])]


def _cursor(sort: str, order: str, place: list[object]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([sort, order, *place])).decode().rstrip("=")


def _read_cursor(cursor: str, sort: str, order: str, length: int) -> list[object]:
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
        found = msgspec.json.decode(raw, type=list[str | int | float])
        if found[:2] != [sort, order] or len(found) != 2 + length:
            raise ValueError
        if any(isinstance(v, int) and v != listed.int64(v) for v in found):
            raise ValueError
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise QueryError("cursor: it is none of a page of this list in this order") from None
    return list(found[2:])
