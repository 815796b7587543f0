"""The local store's writer: SQLite in WAL mode, one writing process, bounded by age and size.

A commit survives the death of the process (``synchronous=NORMAL`` in WAL mode); a power cut can take the last
commits, never the file. `reader` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from whyspan.clock import now_unix_ns
from whyspan.errors import StoreError
from whyspan.model import FAILED

from whyspan_exporters import history, listed, opening, schema
from whyspan_exporters.listed import int64
from whyspan_exporters.opening import PAGE_BYTES
from whyspan_exporters.records import EXPORTER, Counts, Explained, Record, Status

log = logging.getLogger("whyspan.store")

_PRUNE_ROWS = 64
_PRUNE_INTERVAL_NS = 60_000_000_000
_HISTORY_SHARE = 8  # of the store's size, at most one part in so many is what is known of past times


class Store:
    """The SQLite sink.

    When the disk is full (or SQLite fails otherwise), what was taken stays in a bounded queue and is tried
    again at the next `flush`; at the bound the oldest go first and are counted in `dropped`.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_age_ns: int,
        max_bytes: int,
        max_pending: int = 1024,
        now: Callable[[], int] = now_unix_ns,
    ) -> None:
        """Open or create the store.

        Args:
            path: The database file; its folder is made when missing.
            max_age_ns: Findings older than this are deleted, and what is known of the time before.
            max_bytes: Bound of the database and its write-ahead log together.
            max_pending: Findings kept in memory while they cannot be written.
            now: Wall clock, ns since the epoch.

        Raises:
            StoreError: The file cannot be created or opened, or was written by another version of whyspan.
        """
        self.path = path
        self.state = ""  # why the last flush failed; empty when it did not
        self.dropped = 0
        self._max_age_ns = max_age_ns
        self._max_pending = max_pending
        self._now = now
        self._pruned_ns = 0
        self._pending: dict[str, Explained] = {}  # by id: a resend replaces
        self._counts: dict[tuple[str, str, str, str], int] = {}
        self._status: dict[str, Status] = {}
        # The log holds a checkpoint's worth, and a batch (2 MiB) with the deletions that make room for it.
        wal_bytes = min(8 << 20, max_bytes // 3)
        self._max_db_bytes = max_bytes - wal_bytes
        try:
            self._db = opening.to_write(path, wal_bytes)
        except (sqlite3.Error, OSError) as exc:
            raise StoreError(f"cannot open the store {path}: {exc}") from exc
        with contextlib.suppress(sqlite3.Error):  # a full disk is reported by flush
            with self._transaction():
                self._prune()
            self._db.executescript("PRAGMA incremental_vacuum")  # execute() would free one page only

    def emit(self, records: Sequence[Record]) -> None:
        """Take *records*; they are written by `flush`."""
        for record in records:
            if isinstance(record, Explained):
                self._pending.pop(record.id, None)
                self._pending[record.id] = record
            elif isinstance(record, Counts):
                self._counts.update(
                    ((record.instance, c.name, c.service, c.label), c.value) for c in record.counts
                )
            else:
                self._status[record.instance] = record
        while len(self._pending) > self._max_pending:
            del self._pending[next(iter(self._pending))]
            self.dropped += 1

    def flush(self) -> str:
        """Commit what was taken. Returns "" when all of it is, else the reason, such as ``disk full``."""
        due = self._now() - self._pruned_ns > _PRUNE_INTERVAL_NS
        if not (self._pending or self._counts or self._status or due):
            return ""
        try:
            with self._transaction():
                self._write()
        except sqlite3.Error as exc:
            full = getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            self._change_state("disk full" if full else str(exc))
            return self.state
        self._pending.clear()
        self._counts.clear()
        self._status.clear()
        self._change_state("")
        return ""

    def status(self) -> dict[str, Any]:
        """Return why the last flush failed, findings dropped and waiting, and the size of the database in bytes."""
        size = 0
        with contextlib.suppress(sqlite3.Error):
            size = self._used_bytes()
        return {"state": self.state, "dropped": self.dropped, "pending": len(self._pending), "bytes": size}

    def close(self) -> None:
        """Commit what can be committed and close the file."""
        self.flush()
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _change_state(self, state: str) -> None:
        if state == self.state:
            return
        self.state = state
        if state:
            log.warning("store %s: %s; findings wait in memory", self.path, state)
        else:
            log.info("store %s: writing again, %d findings were dropped so far", self.path, self.dropped)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite rolls back by itself on some errors
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def _write(self) -> None:
        now = self._now()
        batch = [_row(r) for r in self._pending.values()]
        # Room first: freed pages are reused in this transaction, so that the file does not pass its bound.
        self._prune(sum(_stored_bytes(row) for row in batch))
        self._db.executemany("INSERT OR REPLACE INTO findings VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", batch)
        self._db.executemany(
            listed.INSERT, [listed.of(r.id, r.start_unix_ns, r.finding) for r in self._pending.values()]
        )
        counts = [(*key, int64(value), now) for key, value in self._counts.items()]
        if self.dropped:
            counts.append((EXPORTER, "store_dropped", "", "", self.dropped, now))
        self._db.executemany("INSERT OR REPLACE INTO counters VALUES (?,?,?,?,?,?)", counts)
        for told in self._status.values():
            if told.instance != EXPORTER:
                history.add_requests(self._db, told.instance, told.status, now)
            history.sample(self._db, told.instance, told.status, now)
        self._db.executemany(
            "INSERT OR REPLACE INTO status VALUES (?,?,?)",
            [(s.instance, now, json.dumps(s.status, default=str)) for s in self._status.values()],
        )

    def _prune(self, needed_bytes: int = 0) -> None:
        now = self._now()
        if now - self._pruned_ns > _PRUNE_INTERVAL_NS:
            self._pruned_ns = now
            oldest = int64(now - self._max_age_ns)
            self._db.execute("DELETE FROM findings WHERE start_unix_ns < ?", (oldest,))
            self._db.execute("DELETE FROM counters WHERE updated_unix_ns < ?", (oldest,))
            self._db.execute("DELETE FROM status WHERE updated_unix_ns < ?", (oldest,))
            history.prune(self._db, now, oldest, self._max_db_bytes // _HISTORY_SHARE)
        while self._used_bytes() + needed_bytes > self._max_db_bytes:
            deleted = self._db.execute(
                "DELETE FROM findings WHERE id IN (SELECT id FROM findings ORDER BY start_unix_ns LIMIT ?)",
                (_PRUNE_ROWS,),
            ).rowcount
            if deleted <= 0:
                return

    def _used_bytes(self) -> int:
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * PAGE_BYTES


def _row(record: Explained) -> tuple[object, ...]:
    finding = record.finding
    request = finding.request
    ttft_ns = int64(request.first_ns - request.start_ns) if request.first_ns else None
    return (
        record.id,
        request.trace_id,
        request.service,
        request.request_id,
        int64(record.start_unix_ns),
        int64(finding.wall_ns),
        ttft_ns,
        int64(request.status),
        schema.SLOW_BIT * finding.slow | schema.FAILED_BIT * (request.outcome in FAILED),
        finding.verdict.cause,
        msgspec.msgpack.encode(finding),
        finding.engine.request_id or None if finding.engine is not None else None,
    )


def _stored_bytes(row: tuple[object, ...]) -> int:
    # The blob in whole pages, and a page for the row's columns and index entries (less, in truth).
    blob = row[-2]
    assert isinstance(blob, bytes)
    return (len(blob) // PAGE_BYTES + 2) * PAGE_BYTES
