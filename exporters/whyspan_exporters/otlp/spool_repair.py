"""Replaces a damaged spool by one with everything that can still be read of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from whyspan_exporters.otlp import spool_file
from whyspan_exporters.otlp.spool_file import Batch, Key


def replace(
    path: Path, wal_bytes: int, known: Mapping[Key, int], wanted: Callable[[int, Batch], bool]
) -> None:
    """Make the file at *path* anew. When this raises (a full disk), the damaged one is still there.

    Args:
        path: The database file, closed.
        wal_bytes: As for `spool_file.connect`.
        known: Totals that are newer than the file's.
        wanted: Whether a row (number, batch) that was read is to be kept.
    """
    new = path.with_name(path.name + ".new")
    _remove(new)
    try:
        with (
            contextlib.closing(spool_file.connect(new, wal_bytes)) as db,
            spool_file.transaction(db),
        ):
            for seq, batch in _readable(path):
                if wanted(seq, batch):
                    row = spool_file.row(seq, batch)
                    db.execute("INSERT OR IGNORE INTO batches VALUES (?,?,?,?,?,?)", row)
            spool_file.write_totals(db, _totals(path) | dict(known))
    except BaseException:
        _remove(new)
        raise
    spool_file.move(path, spool_file.aside(path))
    spool_file.move(new, path)
    _remove(spool_file.aside(path))


def _remove(path: Path) -> None:
    for file in spool_file.files(path):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _readable(path: Path) -> Iterator[tuple[int, Batch]]:
    """From the first row on, then from the last row backwards, each until it breaks."""
    for order in ("ASC", "DESC"):
        with (
            contextlib.suppress(*spool_file.ERRORS),
            contextlib.closing(spool_file.bare(os.fspath(path))) as db,
        ):
            spool_file.check(db)
            last: int | None = None
            for columns in db.execute(
                f"SELECT seq, signal, items, unix_ns, crc, payload FROM batches NOT INDEXED ORDER BY seq {order}"
            ):
                seq: int = columns[0]
                if last is not None and (seq <= last if order == "ASC" else seq >= last):
                    break  # a cycle
                last = seq
                batch = spool_file.batch(columns)
                if batch is not None and spool_file.is_sequence(seq):
                    yield seq, batch
            else:
                return


def _totals(path: Path) -> dict[Key, int]:
    with contextlib.suppress(*spool_file.ERRORS), contextlib.closing(spool_file.bare(os.fspath(path))) as db:
        spool_file.check(db)
        return spool_file.totals(db)
    return {}
