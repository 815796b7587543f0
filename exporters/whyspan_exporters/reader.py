"""The local store's reader: what the command line asks of it. Opens the file read-only."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from whyspan import clock
from whyspan.errors import StoreError
from whyspan.model import Finding

from whyspan_exporters import schema
from whyspan_exporters.records import EXPORTER

_COLUMNS = "id, start_unix_ns, finding"
_MIN_PREFIX = 4
_MATCHES = 20
_HEX = frozenset("0123456789abcdef")
_LAST = "\U0010ffff"  # sorts behind every text that goes on


class Stored(NamedTuple):
    """A finding out of the store."""

    id: str
    start_unix_ns: int
    finding: Finding


class Reader:
    """Questions to a store. Safe beside a running exporter."""

    def __init__(self, path: Path) -> None:
        """Open the store at *path*.

        Raises:
            StoreError: There is none yet, it may not be read, or it was written by another version.
        """
        try:
            exists = path.exists()
        except PermissionError:
            exists = True  # connecting says it better
        if not exists:
            raise StoreError(
                f"there is no store at {path} yet; is `whyspan run` running? (else give --store)"
            )
        self._path = path
        try:
            self._db = self._connect()
            self._version = self._db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as exc:
            raise StoreError(f"cannot read the store {path}: {exc}") from exc
        if self._version != schema.VERSION and self._version not in schema.UPGRADES:
            raise StoreError(
                f"the store {path} has version {self._version}, this whyspan reads {schema.VERSION}"
            )

    def _connect(self) -> sqlite3.Connection:
        uri = self._path.absolute().as_uri()
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=2.0)
        try:
            db.execute("SELECT 1 FROM sqlite_schema").fetchone()
        except sqlite3.OperationalError:
            db.close()
            if self._path.with_name(self._path.name + "-wal").exists():
                raise
            # Nobody writes, and this user may not create the shared-memory file: the file alone is complete.
            db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
        return db

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
        where, values = ["start_unix_ns >= ?"], list[object]([since_unix_ns])
        if not ordinary:
            where.append("slow > 0")
        if failed is not None:
            where.append(f"slow & {schema.FAILED_BIT} {'>' if failed else '='} 0")
        if service:
            where.append("service = ?")
            values.append(service)
        if cause:
            where.append("(cause = ? OR substr(cause, 1, ?) = ?)")
            values += [cause, len(cause) + 1, cause + "."]
        query = (
            f"SELECT {_COLUMNS} FROM findings WHERE {' AND '.join(where)} ORDER BY start_unix_ns DESC LIMIT ?"
        )
        return self._query(query, (*values, limit))

    def find(self, name: str) -> list[Stored]:
        """Return the findings that *name* can mean, slow and longest first; at most 20.

        *name* is a finding's id, an ``x-request-id``, an engine's request id, or the beginning of a trace id (at least
        4 hex digits) or of an engine's request id (at least 4 characters).

        Raises:
            StoreError: The store cannot be read.
        """
        if not name or not _is_text(name):
            return []
        # A store of before the column, that no new exporter has opened yet, has no engine's ids.
        engines = self._version == schema.VERSION
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
            values += [name, name + _LAST]
        return self._matches(" OR ".join(where), tuple(values)) if where else []

    def status(self, max_age_s: float = 30.0) -> dict[str, Any]:
        """Return what the running collector last said of itself; empty when it has been silent for longer.

        Raises:
            StoreError: The store cannot be read.
        """
        return self._status("instance != ?", max_age_s)

    def exporter_status(self, max_age_s: float = 30.0) -> dict[str, Any]:
        """Return the same of the exporter: its process, and the state of each sink under ``sinks``.

        Raises:
            StoreError: The store cannot be read.
        """
        return self._status("instance = ?", max_age_s)

    def states(self) -> list[dict[str, Any]]:
        """Return what each collector that the store knows of last said of itself, however long ago.

        Raises:
            StoreError: The store cannot be read.
        """
        with self._errors():
            rows = self._db.execute("SELECT status FROM status WHERE instance != ?", (EXPORTER,)).fetchall()
            found = [json.loads(text) for (text,) in rows]
            return [state for state in found if isinstance(state, dict)]

    def counters(self, name: str) -> dict[tuple[str, str], int]:
        """Return what was counted as *name* by service and label, over all collectors that the store knows of.

        Raises:
            StoreError: The store cannot be read.
        """
        query = "SELECT service, label, SUM(value) FROM counters WHERE name = ? GROUP BY service, label"
        with self._errors():
            return {(s, label): n for s, label, n in self._db.execute(query, (name,)).fetchall()}

    def _status(self, which: str, max_age_s: float) -> dict[str, Any]:
        oldest = clock.now_unix_ns() - int(max_age_s * 1e9)
        query = (
            f"SELECT status FROM status WHERE {which} AND updated_unix_ns >= ? "
            "ORDER BY updated_unix_ns DESC LIMIT 1"
        )
        with self._errors():
            row = self._db.execute(query, (EXPORTER, oldest)).fetchone()
            found: dict[str, Any] = json.loads(row[0]) if row else {}
            return found

    def _matches(self, where: str, values: tuple[object, ...]) -> list[Stored]:
        query = f"SELECT {_COLUMNS} FROM findings WHERE {where} ORDER BY slow DESC, latency_ns DESC LIMIT ?"
        return self._query(query, (*values, _MATCHES))

    def _query(self, query: str, values: tuple[object, ...]) -> list[Stored]:
        with self._errors():
            rows = self._db.execute(query, values).fetchall()
            return [Stored(i, start, msgspec.msgpack.decode(blob, type=Finding)) for i, start, blob in rows]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError) as exc:
            raise StoreError(f"cannot read the store {self._path}: {exc}") from exc


def _is_text(name: str) -> bool:
    """Whether SQLite can take *name*: half a character of a broken command line is none of anybody's ids."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
