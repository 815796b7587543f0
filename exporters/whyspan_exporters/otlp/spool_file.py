"""The spool's file: its schema, its pragmas, and reading it without trusting a byte of it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from whyspan_exporters.sharing import make_dir

PAGE_BYTES: Final = 4096
#: Of one batch. Below the 4 MiB that a gRPC server takes by default.
MAX_PAYLOAD_BYTES: Final = 3 << 20
#: More items than a batch of this size can hold are damage.
MAX_ITEMS: Final = MAX_PAYLOAD_BYTES
_MAX_SEQ: Final = 1 << 62
_MAX_TOTAL: Final = 1 << 62
_SIGNAL_CHARS: Final = 32
_FILE_MODE: Final = 0o600
# SQLITE_ERROR: no such table, unsupported file format; our statements are right. CONSTRAINT: columns of a broken row.
_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
    }
)

_TABLES: Final = {
    # The payload is last: what stands before it is read without its pages.
    "batches": "CREATE TABLE batches (seq INTEGER PRIMARY KEY, signal TEXT NOT NULL, items INTEGER NOT NULL, "
    "unix_ns INTEGER NOT NULL, crc INTEGER NOT NULL, payload BLOB NOT NULL)",
    "batches_signal": "CREATE INDEX batches_signal ON batches (signal, seq)",
    "totals": "CREATE TABLE totals (signal TEXT NOT NULL, what TEXT NOT NULL, items INTEGER NOT NULL, "
    "PRIMARY KEY (signal, what)) WITHOUT ROWID",
}


#: What reading a damaged file raises; a name in it that SQLite's message quotes may be no UTF-8.
ERRORS: Final = (sqlite3.DatabaseError, UnicodeDecodeError)


class Batch(NamedTuple):
    """One serialised request."""

    signal: str
    payload: bytes
    items: int  # spans or data points
    unix_ns: int  # when it was put in


class Parcel(NamedTuple):
    """The oldest batches of one signal, to be sent in one request."""

    last_seq: int  # 0: not from the disk
    batches: tuple[Batch, ...]

    @property
    def items(self) -> int:
        """How many spans or data points it holds."""
        return sum(b.items for b in self.batches)

    @property
    def payload(self) -> bytes:
        """One request: serialised messages one after the other are one message with all their contents."""
        return b"".join(b.payload for b in self.batches)


class Key(NamedTuple):
    """A total: what became of a signal's items."""

    signal: str
    what: str  # offered, sent, failed, dropped


class SpoolDamaged(sqlite3.DatabaseError):
    """The file is not what this module writes."""


def files(path: Path) -> tuple[Path, Path]:
    """Return the database and its write-ahead log."""
    return path, path.with_name(path.name + "-wal")


def aside(path: Path) -> Path:
    """Return where a damaged file is moved while it is replaced."""
    return path.with_name(path.name + ".damaged")


def move(source: Path, target: Path) -> None:
    """Rename a spool with its log; what was at *target* is gone."""
    for old in files(target):
        old.unlink(missing_ok=True)
    # The log first: with the database gone from under it, it would be taken for the next one's.
    for old, new in reversed(list(zip(files(source), files(target), strict=True))):
        if old.exists():
            old.rename(new)


def is_damage(exc: Exception) -> bool:
    """Return whether *exc* says that the file's contents are wrong, rather than that the disk is full or so."""
    if isinstance(exc, SpoolDamaged | UnicodeDecodeError):
        return True
    code = getattr(exc, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _DAMAGE


def is_full(exc: Exception) -> bool:
    """Return whether *exc* says that the disk is full."""
    return getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def is_damaged(db: sqlite3.Connection) -> bool:
    """Read the whole file and return whether something is wrong with it."""
    try:
        return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok")
    except ERRORS:
        return True


def refuse(db: sqlite3.Connection, exc: BaseException) -> NoReturn:
    """Close *db*, which could not be opened fully, and raise what is the matter with it."""
    # "Disk full" may be a page number out of a damaged page.
    damaged = isinstance(exc, sqlite3.Error) and is_full(exc) and is_damaged(db)
    db.close()
    if damaged:
        raise SpoolDamaged("page numbers beyond its end") from exc
    raise exc


def connect(path: Path | None, wal_bytes: int) -> sqlite3.Connection:
    """Open or make the file for this process alone. Raises `sqlite3.Error` or `OSError`."""
    if path is not None:
        make_dir(path.parent)
        if not path.exists() and aside(path).exists():
            move(aside(path), path)  # whoever was to replace it got no further
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _FILE_MODE))
        _check_versions(path)
    db = bare(":memory:" if path is None else os.fspath(path))
    try:
        # Exclusive: no shared-memory file beside it, which a full disk could take away from under us.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        if db.execute("PRAGMA page_count").fetchone()[0] == 0:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {max(1, wal_bytes // PAGE_BYTES // 4)}")
        db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")
        db.execute("PRAGMA cache_size = -512")
        if not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
            db.executescript("BEGIN IMMEDIATE; " + "; ".join(_TABLES.values()) + "; COMMIT;")
    except BaseException as exc:
        refuse(db, exc)
    return db


def _check_versions(path: Path) -> None:
    # Of the header, bytes 18 and 19: with others than those of a rollback journal or a log SQLite would only read.
    with path.open("rb") as file:
        header = file.read(20)
    if len(header) == 20 and header[18:] not in (b"\1\1", b"\2\2"):
        raise SpoolDamaged("an unknown version of the file format")


def bare(name: str) -> sqlite3.Connection:
    """Open *name* and set what makes a hostile file harmless; nothing is read or made yet."""
    db = sqlite3.connect(name, timeout=2.0, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_PAYLOAD_BYTES + PAGE_BYTES)
    db.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;")
    return db


def check(db: sqlite3.Connection) -> None:
    """Raise `SpoolDamaged` unless the schema is ours to the letter: no view or trigger runs here."""
    found = {
        name: sql
        for name, sql in db.execute("SELECT name, sql FROM sqlite_schema LIMIT 10")
        if sql is not None
    }
    if found != _TABLES:
        raise SpoolDamaged("not a spool of this version")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit at the end, or roll back."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite rolls back by itself on some errors
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


def row(seq: int, batch: Batch) -> tuple[object, ...]:
    """Return *batch* as the columns of its row."""
    return seq, batch.signal, batch.items, batch.unix_ns, _crc(seq, batch), batch.payload


def batch(columns: tuple[Any, ...]) -> Batch | None:
    """Return the batch of a row (seq and all); None when its checksum is wrong."""
    seq, signal, items, unix_ns, crc, payload = columns
    if not (
        isinstance(signal, str)
        and len(signal) <= _SIGNAL_CHARS
        and isinstance(items, int)
        and isinstance(unix_ns, int)
    ):
        return None
    if not isinstance(payload, bytes) or items != bounded_items(items):
        return None
    found = Batch(signal, payload, items, unix_ns)
    return found if _crc(seq, found) == crc else None


def _crc(seq: int, batch: Batch) -> int:
    head = f"{seq}\0{batch.signal}\0{batch.items}\0{batch.unix_ns}\0".encode("utf-8", "surrogatepass")
    return zlib.crc32(batch.payload, zlib.crc32(head))


def bounded_items(items: object) -> int:
    """Return the column as a number of items, whatever it holds."""
    return max(0, min(items, MAX_ITEMS)) if isinstance(items, int) else 0


def is_sequence(found: int) -> bool:
    """Return whether a row can have this number."""
    return 0 < found < _MAX_SEQ


def sequence(found: object, after: int) -> int:
    """Return the column as a number above *after*; a tree with a cycle in it would go on for ever."""
    if not isinstance(found, int) or found <= after or not is_sequence(found):
        raise SpoolDamaged("its rows are out of order")
    return found


def stored_bytes(batch: Batch) -> int:
    """Return what a batch takes, at most: the payload in whole pages, one for its row, one for its index entry."""
    return (len(batch.payload) // (PAGE_BYTES - 4) + 3) * PAGE_BYTES


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the size of the database's pages in use."""
    pages: int = db.execute("PRAGMA page_count").fetchone()[0]
    free: int = db.execute("PRAGMA freelist_count").fetchone()[0]
    return (pages - free) * PAGE_BYTES


def index(db: sqlite3.Connection) -> Iterator[tuple[int, str, int]]:
    """Yield (seq, signal, items) of every row, in order."""
    last = 0
    for seq, signal, items in db.execute("SELECT seq, signal, items FROM batches NOT INDEXED ORDER BY seq"):
        last = sequence(seq, last)
        if not isinstance(signal, str) or len(signal) > _SIGNAL_CHARS:
            raise SpoolDamaged("a signal is no name")
        yield last, signal, bounded_items(items)


def totals(db: sqlite3.Connection) -> dict[Key, int]:
    """Return what was counted so far."""
    out: dict[Key, int] = {}
    for signal, what, items in db.execute("SELECT signal, what, items FROM totals LIMIT 64"):
        if not (
            isinstance(signal, str)
            and isinstance(what, str)
            and isinstance(items, int)
            and 0 <= items < _MAX_TOTAL
        ):
            raise SpoolDamaged("a total is no number")
        out[Key(signal, what)] = items
    return out


def write_totals(db: sqlite3.Connection, changed: Mapping[Key, int]) -> None:
    """Write these totals."""
    db.executemany(
        "INSERT OR REPLACE INTO totals VALUES (?,?,?)", [(*key, value) for key, value in changed.items()]
    )
