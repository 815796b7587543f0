"""Opens a store's file: to write it, for one process; to read it beside that, which may have been somebody else's."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from pathlib import Path
from typing import Final

from whyspan.errors import StoreError

from whyspan_exporters import listed, schema
from whyspan_exporters.sharing import FILE_MODE, make_dir, share

log = logging.getLogger("whyspan.store")

PAGE_BYTES: Final = 4096
#: Of a row, at most: a finding comes in one message of the link, which is far smaller (`link.MAX_FRAME_BYTES`).
_MAX_ROW_BYTES: Final = 32 << 20


def read_only(path: Path) -> tuple[sqlite3.Connection, int]:
    """Return a connection to the store at *path*, and the store's version.

    Raises:
        StoreError: There is none yet, it may not be read, or it was written by another version.
    """
    try:
        exists = path.exists()
    except PermissionError:
        exists = True  # connecting says it better
    if not exists:
        raise StoreError(f"there is no store at {path} yet; is `whyspan run` running? (else give --store)")
    try:
        db = _connect(path)
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_ROW_BYTES)
        # As https://sqlite.org/security.html advises for files of others.
        db.execute("PRAGMA trusted_schema = OFF")
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
    except (sqlite3.Error, PermissionError) as exc:
        raise StoreError(f"cannot read the store {path}: {_denied(path) or exc}") from exc
    if version != schema.VERSION and version not in schema.UPGRADES:
        db.close()
        raise StoreError(f"the store {path} has version {version}, this whyspan reads {schema.VERSION}")
    return db, version


def to_write(path: Path, wal_bytes: int) -> sqlite3.Connection:
    """Return a connection to the store at *path*: made when missing, brought up to date when of an older version.

    Args:
        path: The database file; its folder is made when missing.
        wal_bytes: Bound of the write-ahead log.

    Raises:
        StoreError: It was written by a newer whyspan.
        OSError, sqlite3.Error: It cannot be made or opened.
    """
    make_dir(path.parent)
    if not path.exists():
        # The log and the shared-memory file take their mode and group from the database file.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE_MODE))
    share(path, FILE_MODE)
    db = sqlite3.connect(path, isolation_level=None, timeout=2.0)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0 and not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
        db.executescript(f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA auto_vacuum = INCREMENTAL;")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(f"BEGIN; {schema.TABLES} COMMIT;")
        version = schema.VERSION
    while version in schema.UPGRADES:
        log.info("store %s: bringing version %d up to date", path, version)
        db.executescript(f"BEGIN IMMEDIATE; {schema.UPGRADES[version]}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == schema.VERSION:
            listed.fill(db)
        db.execute("COMMIT")
    if version != schema.VERSION:
        db.close()
        raise StoreError(
            f"the store {path} has version {version}, this whyspan writes {schema.VERSION}: move it away"
        )
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA wal_autocheckpoint = {max(1, wal_bytes // PAGE_BYTES // 4)}")
    db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")
    db.execute("PRAGMA cache_size = -1024")
    return db


def _connect(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri()
    # No transaction of its own accord: one that is left open would see nothing new.
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=2.0, isolation_level=None)
    try:
        db.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        db.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        # Nobody writes, and this user may not create the shared-memory file: the file alone is complete.
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    return db


def _denied(path: Path) -> str:
    """Say whose the file is that this process may not read; empty when it may. SQLite says only that it cannot."""
    if os.access(path, os.R_OK, effective_ids=True):
        return ""
    try:
        found = path.stat()
    except OSError as exc:
        return f"{exc.strerror} (its folder)"
    mode = stat.S_IMODE(found.st_mode)
    return f"permission denied: it is of user {found.st_uid} and group {found.st_gid}, mode {mode:04o}"
