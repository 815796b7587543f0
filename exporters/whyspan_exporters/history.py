"""Keeps what collectors say of themselves over time: the requests of every 10 s, and samples of the host.

A collector tells totals since its start. What is new since the state of it that the store holds is added to the
interval in which it arrives, in the transaction that replaces that state: a resend adds nothing, and a crash loses
nothing. What a collector tells after a break counts where it is told.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
from whyspan.tally import BOUNDS_S

from whyspan_exporters.listed import BROKEN
from whyspan_exporters.metrics.latencies import read as read_series
from whyspan_exporters.metrics.states import number
from whyspan_exporters.schema import SLOT_NS

BUCKETS: Final = len(BOUNDS_S) + 1
#: Rows of ``intervals`` older than a day are joined to ones of 5 min, and one sample of the host in a minute is kept.
FINE_NS: Final = 86_400_000_000_000
JOINED_NS: Final = 300_000_000_000
THINNED_NS: Final = 60_000_000_000
#: Totals that a sample holds, of the table ``counters``.
COUNTED: Final = ("throttled_us", "lost_events")
_MAX_SERVICES: Final = 100  # in an interval
_MAX_NAMES: Final = 64  # in a sample: probes, services, counts
_MAX_NAME: Final = 100
#: A row with its key, its page's overhead and JSON, about: it bounds how many are kept.
_INTERVAL_BYTES: Final = 400
_SAMPLE_BYTES: Final = 4096
_MAX_SAMPLE: Final = 2 * _SAMPLE_BYTES  # a longer one is left out
_MAX_TABLE: Final = 8  # entries of what is told of pressure, of memory
_JOIN_ROWS: Final = 5000  # in one transaction

_ADD = """INSERT INTO intervals VALUES (?,?,?,?,?,?)
ON CONFLICT DO UPDATE SET requests = excluded.requests, failed = excluded.failed, latency = excluded.latency,
ttft = excluded.ttft"""


_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Told(msgspec.Struct):
    """Of a collector's state, what is counted."""

    latencies: list[Any] = []


class Counted:
    """The requests of one service in an interval."""

    def __init__(self) -> None:
        self.requests = self.failed = 0
        self.latency = [0] * BUCKETS
        self.ttft = [0] * BUCKETS

    def add(self, requests: int, failed: int, latency: Iterable[int], ttft: Iterable[int]) -> None:
        """Add others to them."""
        self.requests += requests
        self.failed += failed
        self.latency = [a + b for a, b in zip(self.latency, latency, strict=True)]
        self.ttft = [a + b for a, b in zip(self.ttft, ttft, strict=True)]


def counts_of(text: str) -> list[int]:
    """Return the histogram in a cell of ``intervals``; an empty one when it is none."""
    try:
        found = msgspec.json.decode(text, type=list[_Number])
    except BROKEN:
        found = []
    return found if len(found) == BUCKETS else [0] * BUCKETS


def add_requests(db: sqlite3.Connection, instance: str, status: Mapping[str, Any], now_ns: int) -> None:
    """Add the requests that *status* tells of and the state in the store does not. Call it before that is replaced."""
    row = db.execute("SELECT status FROM status WHERE instance = ?", (instance,)).fetchone()
    told = _latencies(row[0]) if row else []
    if told is None:  # what is new cannot be known: from this state on it can
        return
    before = _series(told)
    new: dict[str, Counted] = {}
    for key, buckets in _series(status.get("latencies")).items():
        name, service, failed = key
        gained = [max(n - m, 0) for n, m in zip(buckets, before.get(key, [0] * BUCKETS), strict=True)]
        if not any(gained):
            continue
        if service not in new and len(new) >= _MAX_SERVICES:
            service = ""
        counted = new.setdefault(service, Counted())
        if name == "ttft":
            counted.add(0, 0, [0] * BUCKETS, gained)
        else:
            counted.add(sum(gained), sum(gained) * failed, gained, [0] * BUCKETS)
    _merge(db, now_ns // SLOT_NS * SLOT_NS, new)


def _merge(db: sqlite3.Connection, start_ns: int, new: Mapping[str, Counted]) -> None:
    for service, counted in new.items():
        query = (
            "SELECT requests, failed, latency, ttft FROM intervals WHERE start_unix_ns = ? AND service = ?"
        )
        for requests, failed, latency, ttft in db.execute(query, (start_ns, service)).fetchall():
            counted.add(requests, failed, counts_of(latency), counts_of(ttft))
        cells = json.dumps(counted.latency), json.dumps(counted.ttft)
        db.execute(_ADD, (start_ns, service, counted.requests, counted.failed, *cells))


def _latencies(text: str) -> list[Any] | None:
    try:
        return msgspec.json.decode(text, type=_Told).latencies
    except BROKEN:
        pass
    try:  # Python's JSON may have NaN in it
        return msgspec.convert(json.loads(text), _Told).latencies
    except (ValueError, *BROKEN):
        return None


def _series(said: Any) -> dict[tuple[str, str, bool], list[int]]:
    """Return the counts per bucket by (histogram, service, whether they failed); of what has no room, service ""."""
    out: dict[tuple[str, str, bool], list[int]] = {}
    for (name, series), buckets in read_series(said).items():
        if name not in ("duration", "ttft"):
            continue
        key = name, series.service, bool(series.error)
        out[key] = [a + b for a, b in zip(out.get(key, [0] * BUCKETS), buckets.counts, strict=True)]
    return out


def sample(db: sqlite3.Connection, instance: str, status: Mapping[str, Any], now_ns: int) -> None:
    """Put what *status* tells of the host, and the totals in the store, in place of the sample of these 10 s."""
    totals: dict[str, dict[str, int]] = {}
    query = (
        "SELECT name, CASE name WHEN 'lost_events' THEN '' ELSE service END, SUM(value) FROM counters"
        f" WHERE instance = ? AND name IN ({','.join('?' * len(COUNTED))}) GROUP BY 1, 2 LIMIT ?"
    )
    for name, service, total in db.execute(query, (instance, *COUNTED, _MAX_NAMES)):
        totals.setdefault(name, {})[service[:_MAX_NAME]] = total
    probes = status.get("probes")
    found: dict[str, Any] = {
        "totals": totals,
        "probes": [
            [str(p.get("name"))[:_MAX_NAME], *(number(p.get(k)) for k in ("hits_per_s", "core_ratio"))]
            for p in (probes[:_MAX_NAMES] if isinstance(probes, list) else ())
            if isinstance(p, dict) and p.get("hits_per_s")
        ],
    }
    for name in ("pressure", "memory"):
        told = status.get(name)
        found[name] = told if isinstance(told, dict) and len(told) <= _MAX_TABLE else {}
    for name in _FIGURES:
        if name in status:
            found[name] = number(status[name])
    text = json.dumps(found, default=str)
    if len(text) <= _MAX_SAMPLE:
        key = now_ns // SLOT_NS * SLOT_NS, instance
        db.execute("INSERT OR REPLACE INTO host_samples VALUES (?,?,?)", (*key, text))


_FIGURES: Final = (
    *("runnable", "cpus", "cpu_s", "rss_bytes", "agent_core_ratio", "bpf_core_ratio", "target_cores"),
    *("events", "open_requests", "findings_dropped", "findings_pending"),
)


def prune(db: sqlite3.Connection, now_ns: int, oldest_ns: int, max_bytes: int) -> None:
    """Forget what is older than *oldest_ns* or does not fit into *max_bytes*; join and thin out what is a day old."""
    for table, size in (("intervals", _INTERVAL_BYTES), ("host_samples", _SAMPLE_BYTES)):
        db.execute(f"DELETE FROM {table} WHERE start_unix_ns < ?", (oldest_ns,))
        most = max(max_bytes // 2 // size, 1)
        if db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] > most:
            query = f"SELECT start_unix_ns FROM {table} ORDER BY start_unix_ns DESC LIMIT 1 OFFSET ?"
            (last,) = db.execute(query, (most - 1,)).fetchone()
            db.execute(f"DELETE FROM {table} WHERE start_unix_ns < ?", (last,))
    old = (now_ns - FINE_NS) // JOINED_NS * JOINED_NS
    db.execute(
        "DELETE FROM host_samples WHERE start_unix_ns < ? AND start_unix_ns % ? != 0", (old, THINNED_NS)
    )
    _join(db, old)


def _join(db: sqlite3.Connection, before_ns: int) -> None:
    query = (
        "SELECT start_unix_ns, service, requests, failed, latency, ttft FROM intervals"
        " WHERE start_unix_ns < ? AND start_unix_ns % ? != 0 ORDER BY start_unix_ns LIMIT ?"
    )
    joined: dict[int, dict[str, Counted]] = {}
    found = db.execute(query, (before_ns, JOINED_NS, _JOIN_ROWS)).fetchall()
    for start, service, requests, failed, latency, ttft in found:
        row = joined.setdefault(start // JOINED_NS * JOINED_NS, {}).setdefault(service, Counted())
        row.add(requests, failed, counts_of(latency), counts_of(ttft))
    for start, by_service in joined.items():
        _merge(db, start, by_service)
    db.executemany(
        "DELETE FROM intervals WHERE start_unix_ns = ? AND service = ?", [(r[0], r[1]) for r in found]
    )
