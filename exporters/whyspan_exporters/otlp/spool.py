"""Encoded batches on disk until they are answered: SQLite in WAL mode, one process, bounded, each row checksummed.

Why SQLite, which this process has loaded already for the store: a transaction makes "these rows go, that one comes,
so many were lost" one thing that a ``kill -9`` cannot split, so that the totals stay exact over restarts; and torn
writes and full disks are its daily bread. A file format of segments, with an index of what was answered, would need
all of that written anew. The queue libraries at hand (persist-queue, litequeue, diskcache) are SQLite too, but pickle
what they hold or bound it in items, refuse at the bound instead of letting the oldest go, and count nothing.

A commit survives the death of the process; a power cut can take the last commits (``synchronous=NORMAL``), never the
file. Not thread-safe: `outbox` locks.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from whyspan_exporters.otlp import spool_file, spool_repair
from whyspan_exporters.otlp.spool_file import Batch, Key, Parcel

log = logging.getLogger("whyspan.otlp")

T = TypeVar("T")

_SHRINK_BYTES: Final = 16 << 20
_EVICT_ROWS: Final = 32


class Queued(NamedTuple):
    """What waits of one signal, or is on its way."""

    items: int = 0
    batches: int = 0


class Spool:
    """Methods raise `sqlite3.Error` or `OSError` when the disk does not play along; nothing is lost by that.

    ``offered = sent + failed + dropped + queued`` of each signal, in items, on disk as in memory. A damaged file is
    replaced by one with everything that can still be read; what cannot is counted as dropped.
    """

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        """Name the file; it is opened at the first use.

        Args:
            path: The database file; its folder is made when missing. None: everything is kept in memory only.
            max_bytes: Bound of the database and its write-ahead log together; at least 16 MiB.
        """
        self.path, self.max_bytes = path, max_bytes
        # The log holds a checkpoint's worth (a quarter of this) and a commit that goes over it.
        self._wal_bytes = min(8 << 20, max_bytes // 4)
        self._db: sqlite3.Connection | None = None
        self._was_full = False
        self._next_seq = 1
        self._queued: dict[str, Queued] = {}
        self._written: dict[Key, int] = {}
        self._unwritten: Counter[Key] = Counter()
        self._done: dict[str, int] = {}  # answered up to here, whether or not the rows could be deleted yet
        self._flying: dict[str, int] = {}  # on their way up to here: not to be evicted

    def open(self) -> None:
        """Open or make the file now."""
        self._work(lambda _: None)

    def close(self) -> None:
        """Write what is left to be written, and close the file; the next use would open it again."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._commit(self._db, ())
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def append(self, batches: Sequence[Batch]) -> None:
        """Store *batches* in order, all or none; the oldest go where there is no room for them."""
        self._work(lambda db: self._commit(db, batches))

    def head(self, signal: str, max_items: int, max_bytes: int) -> Parcel | None:
        """Return the oldest batches of *signal*, one at least, and keep them until `settle` or `release`."""
        return self._work(lambda db: self._head(db, signal, max_items, max_bytes))

    def release(self, signal: str) -> None:
        """Forget that the head of *signal* is on its way; it stays the head."""
        self._flying.pop(signal, None)

    def settle(self, signal: str, parcel: Parcel, *, sent: int, failed: int) -> None:
        """Take out *parcel*, which is the head. When this raises, that is only not written yet."""
        self.release(signal)
        self._done[signal] = parcel.last_seq
        self._change_queued(signal, -parcel.items, -len(parcel.batches))
        self.count(signal, sent=sent, failed=failed)
        self._work(lambda db: self._commit(db, ()))
        if not any(q.batches for q in self._queued.values()):
            self._shrink()

    def count(self, signal: str, **items: int) -> None:
        """Add to totals; they are written with the next commit."""
        for what, n in items.items():
            self._unwritten[Key(signal, what)] += n

    def total(self, signal: str, what: str) -> int:
        """Return a total over all processes that used the file: offered, sent, failed or dropped."""
        key = Key(signal, what)
        return self._written.get(key, 0) + self._unwritten[key]

    def queued(self, signal: str) -> Queued:
        """Return what waits or is on its way."""
        return self._queued.get(signal, Queued())

    def oldest_unix_ns(self) -> int:
        """Return when the oldest batch was put in; 0 when there is none."""
        return self._work(self._oldest)

    def size_bytes(self) -> int:
        """Return the bytes on disk, the write-ahead log included."""
        size = 0
        for file in spool_file.files(self.path) if self.path is not None else ():
            with contextlib.suppress(OSError):
                size += file.stat().st_size
        return size

    def _work(self, what: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return what(self._connection())
        except spool_file.ERRORS as exc:
            if self.path is None or not (spool_file.is_damage(exc) or self._hides_damage(exc)):
                raise
            log.error(
                "otlp: the spool %s is damaged (%s); what can be read of it is kept", self.path, ascii(exc)
            )
        if self._db is not None:
            self._db.close()
            self._db = None
        spool_repair.replace(self.path, self._wal_bytes, self._written, self._is_wanted)
        return what(self._connection())

    def _shrink(self) -> None:
        """Begin with a new file when nothing waits and this one is large: to free 200 MB of pages would take 4 s."""
        if self.path is None or self._db is None or self.size_bytes() <= _SHRINK_BYTES:
            return
        with contextlib.suppress(sqlite3.Error, OSError):
            self._db.close()
            self._db = None
            spool_repair.replace(self.path, self._wal_bytes, self._written, self._is_wanted)

    def _hides_damage(self, exc: Exception) -> bool:
        """Whether "disk full" means a page number out of a damaged page; looked into once, until a commit works."""
        if self._db is None or self._was_full or not spool_file.is_full(exc):
            return False
        self._was_full = True
        return spool_file.is_damaged(self._db)

    def _is_wanted(self, seq: int, batch: Batch) -> bool:
        return seq > self._done.get(batch.signal, 0)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            db = spool_file.connect(self.path, self._wal_bytes)
            try:
                self._read_state(db)
            except BaseException as exc:
                spool_file.refuse(db, exc)
            self._db = db
        return self._db

    def _read_state(self, db: sqlite3.Connection) -> None:
        spool_file.check(db)
        queued: dict[str, Queued] = {}
        seq = 0
        for seq, signal, items in spool_file.index(db):
            if seq > self._done.get(signal, 0):
                old = queued.get(signal, Queued())
                queued[signal] = Queued(old.items + items, old.batches + 1)
        self._written = spool_file.totals(db)
        self._queued = queued
        self._next_seq = max(self._next_seq, seq + 1)
        for signal in {key.signal for key in self._written} | set(queued):
            missing = self.total(signal, "offered") - self.queued(signal).items
            self._set_right(
                signal, missing - sum(self.total(signal, what) for what in ("sent", "failed", "dropped"))
            )

    def _set_right(self, signal: str, missing: int) -> None:
        """Count items that were offered and are nowhere; less than none when the totals are what is missing."""
        if missing > 0:
            log.warning("otlp: %d items of %s are missing from the spool", missing, signal)
        self.count(signal, **{"dropped" if missing > 0 else "offered": abs(missing)})

    def _change_queued(self, signal: str, items: int, batches: int) -> None:
        old = self.queued(signal)
        self._queued[signal] = Queued(old.items + items, old.batches + batches)

    def _head(self, db: sqlite3.Connection, signal: str, max_items: int, max_bytes: int) -> Parcel | None:
        self.release(signal)
        taken: list[Batch] = []
        items = size = 0
        seq = self._done.get(signal, 0)
        with contextlib.closing(
            db.execute(
                "SELECT seq, signal, items, unix_ns, crc, payload FROM batches "
                "WHERE signal = ? AND seq > ? ORDER BY seq",
                (signal, seq),
            )
        ) as rows:
            for columns in rows:
                if columns[1] != signal:
                    raise spool_file.SpoolDamaged("its index leads elsewhere")
                batch = spool_file.batch(columns)
                if batch is None and not taken:
                    seq = spool_file.sequence(columns[0], seq)
                    self._drop_head(signal, seq, spool_file.bounded_items(columns[2]))
                    continue
                if batch is None or (
                    taken and (items + batch.items > max_items or size + len(batch.payload) > max_bytes)
                ):
                    break
                seq = spool_file.sequence(columns[0], seq)
                taken.append(batch)
                items, size = items + batch.items, size + len(batch.payload)
        if taken:
            self._flying[signal] = seq
            return Parcel(seq, tuple(taken))
        if self.queued(signal).batches > 0:
            raise spool_file.SpoolDamaged("rows are missing from its index")
        self._set_right(
            signal, self.queued(signal).items
        )  # of a damaged tree, in which a row was found twice
        self._queued.pop(signal, None)
        return None

    def _drop_head(self, signal: str, seq: int, items: int) -> None:
        log.error("otlp: the spool gave back a damaged batch of %d items of %s", items, signal)
        self._done[signal] = seq
        self._change_queued(signal, -items, -1)
        self.count(signal, dropped=items)

    def _oldest(self, db: sqlite3.Connection) -> int:
        query = "SELECT unix_ns FROM batches WHERE signal = ? AND seq > ? ORDER BY seq LIMIT 1"
        found = [db.execute(query, (s, self._done.get(s, 0))).fetchone() for s in self._queued]
        return min((row[0] for row in found if row and isinstance(row[0], int)), default=0)

    def _commit(self, db: sqlite3.Connection, batches: Sequence[Batch]) -> None:
        """Delete what is answered, make room, insert, write the totals: all of it or nothing."""
        new = Counter(self._unwritten)
        lost: list[tuple[str, int]] = []
        seq = self._next_seq
        with spool_file.transaction(db):
            for signal, done in self._done.items():
                db.execute("DELETE FROM batches WHERE signal = ? AND seq <= ?", (signal, done))
            if batches:
                lost = self._evict(db, sum(spool_file.stored_bytes(b) for b in batches))
            for seq, b in enumerate(batches, self._next_seq):
                db.execute("INSERT INTO batches VALUES (?,?,?,?,?,?)", spool_file.row(seq, b))
                new[Key(b.signal, "offered")] += b.items
            for signal, items in lost:
                new[Key(signal, "dropped")] += items
            totals = {key: self._written.get(key, 0) + n for key, n in new.items()}
            spool_file.write_totals(db, totals)
        self._was_full = False
        self._written |= totals
        self._unwritten.clear()
        self._next_seq += len(batches)
        for signal, items in lost:
            self._change_queued(signal, -items, -1)
        for b in batches:
            self._change_queued(b.signal, b.items, 1)

    def _evict(self, db: sqlite3.Connection, needed: int) -> list[tuple[str, int]]:
        """Delete the oldest rows until *needed* bytes have room; returns the signal and items of each."""
        bound = self.max_bytes - self._wal_bytes - needed
        lost: list[tuple[str, int]] = []
        last = 0
        while spool_file.used_bytes(db) > bound:
            query = "SELECT seq, signal, items FROM batches WHERE seq > ? ORDER BY seq LIMIT ?"
            rows = db.execute(query, (last, _EVICT_ROWS)).fetchall()
            for seq, signal, items in rows:
                last = spool_file.sequence(seq, last)
                if last <= self._flying.get(signal, 0):
                    continue  # counted as sent or failed when it is answered
                db.execute("DELETE FROM batches WHERE seq = ?", (last,))
                lost.append((str(signal), spool_file.bounded_items(items)))
                if spool_file.used_bytes(db) <= bound:
                    break
            if not rows:
                break
        return lost
