"""The local store's reader: what the command line asks of it. Opens the file read-only."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from whyspan import clock
from whyspan.errors import StoreError
from whyspan.model import Finding

from whyspan_exporters import opening
from whyspan_exporters.filters import LAST, Filter
from whyspan_exporters.listed import BROKEN, is_text
from whyspan_exporters.listing import Listing
from whyspan_exporters.metrics.states import parse
from whyspan_exporters.recall import Recall
from whyspan_exporters.records import EXPORTER

_COLUMNS = "id, start_unix_ns, finding"
_MIN_PREFIX = 4
#: Of SQLite's machine, between two looks at the clock: well under 1 ms.
STEPS = 10_000
_MATCHES = 20
_HEX = frozenset("0123456789abcdef")
#: A collector that said nothing for so long does not run: it tells of itself every second.
SILENT_S = 30.0


class Stored(NamedTuple):
    """A finding out of the store."""

    id: str
    start_unix_ns: int
    finding: Finding


class Reader:
    """Questions to a store. Safe beside a running exporter.

    ``requests`` has lists of requests, ``history`` what was counted and sampled over time.
    """

    def __init__(self, path: Path, deadline_s: float = 0.0) -> None:
        """Open the store at *path*.

        Args:
            path: The file.
            deadline_s: After so much time SQLite gives up what it is asked; 0: never.

        Raises:
            StoreError: There is none yet, it may not be read, or it was written by another version.
        """
        self._path = path
        self._deadline_s = deadline_s
        self._ends = time.monotonic() + deadline_s
        self._db, self._version = opening.read_only(path)
        self.requests = Listing(self._db, self._errors, self._version)
        self.history = Recall(self._db, self._errors, self._version)
        if deadline_s:
            self._db.set_progress_handler(self._late, STEPS)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def newest(
        self,
        *,
        service: str = "",
        cause: str = "",
        since_unix_ns: int = 0,
        limit: int = 20,
        ordinary: bool = False,
        failed: bool | None = None,
    ) -> list[Stored]:
        """Return up to *limit* findings, newest first; only of slow and failed requests unless *ordinary*.

        Args:
            service: Only this service.
            cause: Only this cause id, or every cause below it (``cpu`` takes ``cpu.throttled`` too).
            since_unix_ns: Only requests that started at or after this time.
            limit: At most so many.
            ordinary: Take the requests that were neither slow nor failed as well.
            failed: Only those that failed, or none of them.

        Raises:
            StoreError: The store cannot be read.
        """
        wanted = Filter(
            service=service, cause=cause, since_unix_ns=since_unix_ns, ordinary=ordinary, failed=failed
        )
        rows = self.requests.page(wanted, limit=limit, count=False).rows
        query = f"SELECT {_COLUMNS} FROM findings WHERE id IN (SELECT value FROM json_each(?))"
        found = self._query(query, (json.dumps([row.id for row in rows]),))
        by_id = {s.id: s for s in found}
        return [by_id[row.id] for row in rows if row.id in by_id]

    def get(self, name: str) -> Stored | None:
        """Return the finding with the id *name*; None when there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        if not is_text(name):
            return None
        found = self._query(f"SELECT {_COLUMNS} FROM findings WHERE id = ?", (name,))
        return found[0] if found else None

    def of_trace(self, trace_id: str) -> str:
        """Return the id of the slowest request of a trace; "" when there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        query = "SELECT id FROM findings WHERE trace_id = ? ORDER BY latency_ns DESC LIMIT 1"
        with self._errors():
            row = self._db.execute(query, (trace_id,)).fetchone()
            return row[0] if row else ""

    def find(self, name: str) -> list[Stored]:
        """Return the findings that *name* can mean, slow and longest first; at most 20.

        *name* is a finding's id, an ``x-request-id``, an engine's request id, or the beginning of a trace id (at least
        4 hex digits) or of an engine's request id (at least 4 characters).

        Raises:
            StoreError: The store cannot be read.
        """
        if not name or not is_text(name):
            return []
        # A store of before the column, that no new exporter has opened yet, has no engine's ids.
        engines = self._version > 1
        exact = (("id", name), ("request_id", name), ("trace_id", name.lower()), ("engine_request", name))
        for column, value in exact if engines else exact[:-1]:
            # The second half tells SQLite that the partial index will do.
            if found := self._matches(f"{column} = ? AND {column} != ''", (value,)):
                return found
        if len(name) < _MIN_PREFIX:
            return []
        where, values = list[str](), list[object]()
        prefix = name.lower()
        if len(prefix) <= 32 and _HEX.issuperset(prefix):
            where.append("(trace_id >= ? AND trace_id < ?)")
            values += [prefix, prefix + "g"]
        if engines:
            where.append("(engine_request >= ? AND engine_request < ?)")
            values += [name, name + LAST]
        return self._matches(" OR ".join(where), tuple(values)) if where else []

    def status(self, max_age_s: float = SILENT_S) -> dict[str, Any]:
        """Return what the running collector last said of itself; empty when it has been silent for longer.

        Raises:
            StoreError: The store cannot be read.
        """
        return self._status("", max_age_s)

    def exporter_status(self, max_age_s: float = SILENT_S) -> dict[str, Any]:
        """Return the same of the exporter: its process, and the state of each sink under ``sinks``.

        Raises:
            StoreError: The store cannot be read.
        """
        return self._status(EXPORTER, max_age_s)

    def states(self) -> list[dict[str, Any]]:
        """Return what each collector that the store knows of last said of itself, however long ago.

        Raises:
            StoreError: The store cannot be read.
        """
        with self._errors():
            rows = self._db.execute("SELECT status FROM status WHERE instance != ?", (EXPORTER,)).fetchall()
            found = msgspec.convert(rows, list[tuple[str]])
        return [state for (text,) in found if (state := parse(text))]

    def counters(self, name: str) -> dict[tuple[str, str], int]:
        """Return what was counted as *name* by service and label, over all collectors that the store knows of.

        Raises:
            StoreError: The store cannot be read.
        """
        query = "SELECT service, label, SUM(value) FROM counters WHERE name = ? GROUP BY service, label"
        with self._errors():
            rows = self._db.execute(query, (name,)).fetchall()
            return {(s, label): n for s, label, n in msgspec.convert(rows, list[tuple[str, str, int]])}

    def _status(self, instance: str, max_age_s: float) -> dict[str, Any]:
        told_ns, told = self.history.said(instance)
        return told if told_ns >= clock.now_unix_ns() - int(max_age_s * 1e9) else {}

    def _matches(self, where: str, values: tuple[object, ...]) -> list[Stored]:
        query = f"SELECT {_COLUMNS} FROM findings WHERE {where} ORDER BY slow DESC, latency_ns DESC LIMIT ?"
        return self._query(query, (*values, _MATCHES))

    def _query(self, query: str, values: tuple[object, ...]) -> list[Stored]:
        with self._errors():
            rows = msgspec.convert(self._db.execute(query, values).fetchall(), list[tuple[str, int, bytes]])
            return [Stored(i, start, msgspec.msgpack.decode(blob, type=Finding)) for i, start, blob in rows]

    def _late(self) -> bool:
        return time.monotonic() > self._ends

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as exc:
            # Python raises it itself, without a code, for text that is not UTF-8.
            if self._deadline_s and getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise StoreError(f"not answered within {self._deadline_s:g} s: ask for less") from exc
            raise StoreError(f"cannot read the store {self._path}: {exc}") from exc
        except (sqlite3.Error, *BROKEN) as exc:
            raise StoreError(f"cannot read the store {self._path}: {exc}") from exc
