"""What the store keeps of past times: every request counted once, samples of the host, both bounded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whyspan.config import Slo
from whyspan.model import Finding
from whyspan.tally import BOUNDS_S, Tally, bucket
from whyspan_exporters import history, schema
from whyspan_exporters.link import Count
from whyspan_exporters.reader import Reader
from whyspan_exporters.recall import finest_step_ns
from whyspan_exporters.records import EXPORTER, Counts, Explained, Status
from whyspan_exporters.store import Store

MakeFinding = Callable[..., Finding]
S = 1_000_000_000
DAY = 86_400 * S
NOW = 1_800_000_000 * S


class Clock:
    """A wall clock that is set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(path: Path, clock: Clock, max_bytes: int = 64 << 20) -> Store:
    return Store(path, max_age_ns=7 * DAY, max_bytes=max_bytes, now=clock)


class Collector:
    """Counts requests as the real one does."""

    def __init__(self, make: MakeFinding, instance: str = "i") -> None:
        self.make, self.instance = make, instance
        self.tally = Tally()

    def serve(
        self, count: int, ms: float, service: str = "chat", *, ttft_ms: float = 1.0, status: int = 200
    ) -> None:
        for _ in range(count):
            r = self.make(
                1, service=service, status=status, outcome="ok" if status < 400 else "error"
            ).request
            r.first_ns, r.end_ns = r.start_ns + int(ttft_ms * 1e6), r.start_ns + int(ms * 1e6)
            self.tally.add(r, Slo(), "")

    def tell(self, store: Store, **more: Any) -> None:
        store.emit([Status(self.instance, {**self.tally.state(0), **more})])


def counted(path: Path, service: str = "", step_ns: int = 10 * S) -> dict[int, tuple[int, int]]:
    """Return (requests, failed) by step of 10 s since NOW."""
    reader = Reader(path)
    found = reader.history.requests(NOW - DAY, NOW + 10 * DAY, step_ns, service)
    reader.close()
    for one in found.values():
        assert sum(one.latency) == one.requests
    return {step - DAY // step_ns: (one.requests, one.failed) for step, one in found.items()}


def test_every_request_counts_once_in_its_interval(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    store, collector = opened(path, clock), Collector(make_finding)
    collector.serve(7, 40.0, ttft_ms=30.0)
    collector.serve(2, 3000.0, "embed", status=503)
    for _ in range(3):  # told again: nothing more
        collector.tell(store)
        assert store.flush() == ""
    clock.now += 9 * S
    collector.serve(4, 40.0)
    collector.tell(store)
    assert store.flush() == ""
    clock.now += 5 * S
    collector.serve(1, 900_000.0)
    collector.tell(store)
    assert store.flush() == ""
    clock.now += 30 * S
    collector.tell(store)
    assert store.flush() == ""
    store.close()
    assert counted(path) == {0: (13, 2), 1: (1, 0)}
    assert counted(path, "embed") == {0: (2, 2)}
    reader = Reader(path)
    chat = reader.history.requests(NOW, NOW + 10 * S, 10 * S, "chat")[0]
    assert chat.latency == [11 if i == bucket(0.04) else 0 for i in range(len(BOUNDS_S) + 1)]
    assert chat.ttft[bucket(0.03)] == 7
    assert chat.ttft[bucket(0.001)] == 4
    assert reader.history.requests(NOW + 10 * S, NOW + 20 * S, 10 * S)[0].latency[-1] == 1
    assert reader.history.services(0, NOW + DAY) == ["chat", "embed"]
    assert reader.history.first_unix_ns() == NOW
    reader.close()


def test_a_restart_of_either_side_counts_nothing_twice(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    first = Collector(make_finding, "a")
    first.serve(5, 40.0)
    store = opened(path, clock)
    first.tell(store)
    store.close()
    store = opened(path, clock)  # the exporter's process was another
    first.serve(3, 40.0)
    first.tell(store)
    assert store.flush() == ""
    second = Collector(make_finding, "b")  # the collector's too: totals begin at 0
    second.serve(2, 40.0)
    second.tell(store)
    assert store.flush() == ""
    first.tell(store)
    store.close()
    assert counted(path) == {0: (10, 0)}


def test_a_full_disk_counts_nothing_twice_and_loses_nothing(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    store, collector = opened(path, clock), Collector(make_finding)
    collector.serve(5, 40.0)
    collector.tell(store)
    real = history.sample

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(history, "sample", full)
    for _ in range(3):
        assert store.flush() == "database or disk is full"
    collector.serve(2, 40.0)
    collector.tell(store)
    monkeypatch.setattr(history, "sample", real)
    assert store.flush() == ""
    store.close()
    assert counted(path) == {0: (7, 0)}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"latencies": None},
        {"latencies": "junk"},
        {"latencies": ["junk", ["short"], [1, 2, 3], {"a": 1}]},
        {"latencies": [["chat", "", "", False, [[1] * 3], [0.0]]]},
        {"latencies": [["chat", "", "", False, [[-1] * 25], [0.0]]]},
        {"latencies": [["chat", "", "", False, [[1 << 70] * 25], [0.0]]]},
        {"latencies": [["chat", "", "", False, [["1"] * 25], [float("nan")]]]},
        {"pressure": "high", "memory": 3, "probes": "none", "runnable": [], "cpus": float("nan")},
        {"probes": [1, None, {"name": None, "hits_per_s": "many"}, {"hits_per_s": 1}]},
        {"pressure": {str(n): {"some": "x" * 1000} for n in range(8)}},
    ],
)
def test_what_makes_no_sense_is_not_kept(tmp_path: Path, clock: Clock, told: dict[str, Any]) -> None:
    path = tmp_path / "s.db"
    store = opened(path, clock)
    for _ in range(2):
        store.emit([Status("i", told)])
        assert store.flush() == ""
    store.close()
    assert counted(path) == {}
    reader = Reader(path)
    assert len([*reader.history.samples(0, NOW + DAY, 10 * S)]) <= 1
    reader.close()


def test_after_a_state_that_cannot_be_read_counting_goes_on(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    store, collector = opened(path, clock), Collector(make_finding)
    collector.serve(5, 40.0)
    collector.tell(store, weird=float("nan"))  # JSON has none
    assert store.flush() == ""
    collector.serve(3, 40.0)
    collector.tell(store)
    assert store.flush() == ""
    collector.serve(2, 40.0)
    collector.tell(store)
    store.close()
    assert counted(path)[0][0] == 10


def test_more_services_than_there_is_room_for_are_counted_together(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    store, collector = opened(path, clock), Collector(make_finding)
    for n in range(90):  # the tally's own bound is 64 series
        collector.serve(1, 40.0, f"s{n}")
    collector.tell(store)
    store.close()
    assert counted(path) == {0: (90, 0)}
    assert counted(path, "s5") == {0: (1, 0)}
    assert counted(path, "s89") == {}


def test_samples_hold_what_was_told_last_in_ten_seconds(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "s.db"
    store = opened(path, clock)
    probe = {"name": "sched", "hits_per_s": 9.0, "core_ratio": 0.01, "files": ["long"] * 1000}
    for second in range(0, 25, 2):
        clock.now = NOW + second * S
        totals = [
            Count("throttled_us", "chat", "", second),
            Count("lost_events", "", "a", 1),
            Count("lost_events", "", "b", second),
            Count("slo", "chat", "x", 3),
        ]
        told = {
            "runnable": second,
            "pressure": {"cpu": {"some": 0.5}},
            "probes": [probe, {"name": "off", "hits_per_s": 0.0}],
            "cpu_s": 1.5,
            "sinks": {"x": 1},
        }
        store.emit([Counts("i", totals), Status("i", told), Status(EXPORTER, {"cpu_s": 0.5})])
        assert store.flush() == ""
    store.close()
    reader = Reader(path)
    found = [*reader.history.samples(NOW, NOW + 20 * S, 10 * S)]
    assert [(s.start_unix_ns - NOW, s.instance) for s in found] == [
        (0, EXPORTER),
        (0, "i"),
        (10 * S, EXPORTER),
        (10 * S, "i"),
    ]
    assert found[1].told == {
        "totals": {"throttled_us": {"chat": 8}, "lost_events": {"": 9}},
        "probes": [["sched", 9.0, 0.01]],
        "pressure": {"cpu": {"some": 0.5}},
        "memory": {},
        "runnable": 8,
        "cpu_s": 1.5,
    }
    assert [s.told["runnable"] for s in found if s.instance == "i"] == [8, 18]
    assert [s.start_unix_ns - NOW for s in reader.history.samples(NOW, NOW + DAY, 30 * S)] == [20 * S] * 2
    assert reader.history.said()[0] == NOW + 24 * S
    assert reader.history.said(EXPORTER)[1] == {"cpu_s": 0.5}
    reader.close()


def test_after_a_day_intervals_are_joined_and_samples_thinned(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    store, collector = opened(path, clock), Collector(make_finding)
    each = 50  # a quarter of an hour and a bit
    for n in range(each):
        clock.now = NOW + n * 10 * S
        collector.serve(n + 1, 40.0)
        collector.serve(1, 2000.0, "embed", status=500)
        collector.tell(store, runnable=n)
        assert store.flush() == ""
    clock.now = NOW + DAY + 3600 * S
    for _ in range(3):  # once is enough
        store.emit([Status(EXPORTER, {})])
        assert store.flush() == ""
        clock.now += 61 * S
    store.close()
    db = sqlite3.connect(path)
    starts = [s - NOW for (s,) in db.execute("SELECT DISTINCT start_unix_ns FROM intervals ORDER BY 1")]
    assert starts == [0, 300 * S]
    kept = db.execute(
        "SELECT start_unix_ns, sample FROM host_samples WHERE instance = 'i' ORDER BY 1"
    ).fetchall()
    assert [(s - NOW, json.loads(t)["runnable"]) for s, t in kept] == [(n * 60 * S, n * 6) for n in range(9)]
    db.close()
    total = each * (each + 1) // 2
    assert counted(path, "chat", 300 * S) == {0: (30 * 31 // 2, 0), 1: (total - 30 * 31 // 2, 0)}
    assert counted(path, "embed", 300 * S) == {0: (30, 30), 1: (20, 20)}
    assert finest_step_ns(clock.now - DAY + 1, clock.now) == schema.SLOT_NS
    assert finest_step_ns(NOW, clock.now) == 300 * S


def test_what_is_too_old_goes(tmp_path: Path, clock: Clock, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store, collector = opened(path, clock), Collector(make_finding)
    for day in range(0, 12, 3):
        clock.now = NOW + day * DAY
        collector.serve(1, 40.0)
        collector.tell(store)
        assert store.flush() == ""
    store.close()
    assert sorted(counted(path, step_ns=DAY)) == [3, 6, 9]
    reader = Reader(path)
    assert next(s.start_unix_ns for s in reader.history.samples(0, NOW + 20 * DAY, DAY)) == NOW + 3 * DAY
    reader.close()


def test_history_has_a_part_of_the_store_and_no_more(
    tmp_path: Path, clock: Clock, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    max_bytes = 2 << 20
    store, collector = opened(path, clock, max_bytes), Collector(make_finding)
    store._db.execute("PRAGMA synchronous = OFF")
    biggest = 0
    for n in range(120):
        clock.now += 10 * S
        for service in range(8):
            collector.serve(1, 40.0, f"service-{service}")
        collector.tell(store, probes=[{"name": "p" * 100, "hits_per_s": 1.0}] * 40)
        store.emit([Explained(f"i-{n}", clock.now, make_finding(n, segments=60))])
        assert store.flush() == ""
        biggest = max(biggest, sum(f.stat().st_size for f in tmp_path.iterdir() if f.name != "s.db-shm"))
    store.close()
    assert biggest <= max_bytes
    db = sqlite3.connect(path)

    def size(table: str) -> int:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        lengths = " + ".join(f"length({c})" for c in columns)
        found: int = db.execute(f"SELECT TOTAL({lengths}) FROM {table}").fetchone()[0]
        return found

    (rows,) = db.execute("SELECT COUNT(*) FROM intervals").fetchone()
    assert 100 < rows < 120 * 8  # some, not all, and the newest
    assert db.execute("SELECT MAX(start_unix_ns) FROM intervals").fetchone() == (
        clock.now // (10 * S) * 10 * S,
    )
    assert size("intervals") + size("host_samples") <= max_bytes // 8
    assert db.execute("SELECT COUNT(*) FROM findings").fetchone()[0] > 30
    db.close()
