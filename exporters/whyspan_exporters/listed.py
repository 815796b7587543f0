"""A stored request as a list shows it: the row of the table ``requests`` that goes with a finding."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
from whyspan import phases
from whyspan.model import FAILED, Finding

from whyspan_exporters import schema
from whyspan_exporters.metrics.states import number

#: What decoding raises when its input is broken, or nested without end.
BROKEN: Final = (msgspec.MsgspecError, RecursionError)
_INT64_MAX: Final = (1 << 63) - 1
#: Characters of a text that lists show; the finding has all of it.
_MAX_TEXT: Final = 200


class Listed(NamedTuple):
    """A request in the order of the table's columns. ``cause`` is empty when it was neither slow nor failed.

    ``slow`` holds `schema.SLOW_BIT` and `schema.FAILED_BIT`; ``ttft_ns`` is None when no byte of a body was sent.
    """

    id: str
    trace_id: str
    service: str
    method: str
    route: str
    model: str
    tenant: str
    start_unix_ns: int
    latency_ns: int
    ttft_ns: int | None
    status: int
    outcome: str
    slow: int
    cause: str
    excess_ms: float
    share: float
    confidence: float
    culprit_kind: str
    culprit: str
    phase: str


COLUMNS: Final = ", ".join(Listed._fields)
INSERT: Final = f"INSERT OR REPLACE INTO requests ({COLUMNS}) VALUES ({','.join('?' * len(Listed._fields))})"


def of(name: str, start_unix_ns: int, finding: Finding) -> Listed:
    """Return the row of the finding with the id *name*."""
    r, v = finding.request, finding.verdict
    slow = schema.SLOW_BIT * finding.slow | schema.FAILED_BIT * (r.outcome in FAILED)
    return Listed(
        id=name,
        trace_id=r.trace_id[:_MAX_TEXT],
        service=r.service[:_MAX_TEXT],
        method=r.method[:_MAX_TEXT],
        route=r.route[:_MAX_TEXT],
        model=finding.engine.model[:_MAX_TEXT] if finding.engine is not None else "",
        tenant=r.tenant[:_MAX_TEXT],
        start_unix_ns=int64(start_unix_ns),
        latency_ns=int64(finding.wall_ns),
        ttft_ns=int64(r.first_ns - r.start_ns) if r.first_ns else None,
        status=int64(r.status),
        outcome=r.outcome[:_MAX_TEXT],
        slow=slow,
        cause=v.cause[:_MAX_TEXT] if slow else "",
        # SQLite stores NaN as NULL, and JSON has no infinity.
        excess_ms=number(v.excess_ms) or 0.0,
        share=number(v.share) or 0.0,
        confidence=number(v.confidence) or 0.0,
        culprit_kind=v.culprit.kind[:_MAX_TEXT],
        culprit=v.culprit.name[:_MAX_TEXT],
        phase=phases.of_cause(finding)[:_MAX_TEXT] if slow else "",
    )


def of_blobs(found: Iterable[tuple[str, int, bytes]]) -> Iterator[Listed]:
    """Yield the rows of (id, start, finding as stored); nothing of one that is broken: a list can do without."""
    decoder = msgspec.msgpack.Decoder(Finding)
    for name, start, blob in found:
        try:
            yield of(name, start, decoder.decode(blob))
        except BROKEN:
            continue


def fill(db: sqlite3.Connection, table: str = "requests") -> None:
    """Add to ``requests`` the findings that are missing in it. Their blobs are read one by one."""
    missing = db.execute(
        f"SELECT id, start_unix_ns, finding FROM findings WHERE id NOT IN (SELECT id FROM {table})"
    )
    db.executemany(INSERT.replace("INTO requests", f"INTO {table}"), of_blobs(missing))


def is_text(value: str) -> bool:
    """Return whether SQLite can take *value*: half a character of a broken command line is in nobody's names."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def int64(value: int) -> int:
    """Return the nearest number that SQLite and OTLP can carry; one broken record must not stop the others."""
    return max(-_INT64_MAX, min(value, _INT64_MAX))
