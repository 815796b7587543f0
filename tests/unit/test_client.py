"""The collector's side of the link: nothing lost while the exporter is away, everything counted."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from whyspan.model import Finding
from whyspan_exporters.client import Client

MakeFinding = Callable[..., Finding]
StartExporter = Callable[..., "subprocess.Popen[bytes]"]
WaitFor = Callable[..., None]


def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "exporter.sock"


def query(tmp_path: Path, text: str) -> list[tuple[object, ...]]:
    db = sqlite3.connect(tmp_path / "state" / "whyspan.db")
    try:
        return db.execute(text).fetchall()
    finally:
        db.close()


def test_findings_counts_and_status_arrive(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding
) -> None:
    start_exporter()
    client = Client(socket_path(tmp_path), instance="abc")
    for n in range(300):
        assert client.offer(make_finding(n))
        client.count("requests", service="chat", label="200")
    client.count("not_explained", 23, service="chat")
    client.status({"probes": {"sched": "ok"}})
    assert client.close(20)
    stats = client.stats()
    assert (stats.offered, stats.acked, stats.dropped, stats.pending) == (300, 300, 0, 0)
    assert query(tmp_path, "SELECT count(*), count(DISTINCT trace_id) FROM findings") == [(300, 300)]
    assert query(tmp_path, "SELECT name, service, label, value FROM counters ORDER BY name") == [
        ("not_explained", "chat", "", 23),
        ("requests", "chat", "200", 300),
    ]
    ((status,),) = query(tmp_path, "SELECT status FROM status WHERE instance = 'abc'")
    assert json.loads(str(status)) == {"probes": {"sched": "ok"}}


def test_a_killed_exporter_loses_nothing(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding, wait_for: WaitFor
) -> None:
    process = start_exporter()
    client = Client(socket_path(tmp_path))
    n = 0
    for _ in range(3):
        until = client.stats().acked + 40
        while client.stats().acked < until:
            client.offer(make_finding(n))
            client.count("requests")
            n += 1
            time.sleep(0.001)
        process.kill()
        process.wait()
        for _ in range(50):
            assert client.offer(make_finding(n))
            client.count("requests")
            n += 1
        process = start_exporter()
    assert client.close(20)
    stats = client.stats()
    assert (stats.offered, stats.acked, stats.dropped) == (n, n, 0)
    stored = {int(str(t), 16) for (t,) in query(tmp_path, "SELECT trace_id FROM findings")}
    assert stored == set(range(n))
    assert query(tmp_path, "SELECT value FROM counters WHERE name = 'requests'") == [(n,)]


def test_queue_is_bounded_and_drops_the_oldest_counted(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding
) -> None:
    client = Client(socket_path(tmp_path), capacity=20)
    kept = [client.offer(make_finding(n)) for n in range(43)]
    assert kept == [True] * 20 + [False] * 23
    stats = client.stats()
    assert (stats.offered, stats.acked, stats.dropped, stats.pending) == (43, 0, 23, 20)
    start_exporter()
    assert client.close(20)
    stored = sorted(int(str(t), 16) for (t,) in query(tmp_path, "SELECT trace_id FROM findings"))
    assert stored == list(range(23, 43))
    stats = client.stats()
    assert stats.offered == stats.acked + stats.dropped == 43


def test_queue_is_bounded_in_bytes(tmp_path: Path, make_finding: MakeFinding) -> None:
    size = len(msgspec.msgpack.encode(make_finding(100)))
    client = Client(socket_path(tmp_path), max_bytes=5 * size)
    for n in range(100, 107):
        client.offer(make_finding(n))
    assert (client.stats().pending, client.stats().dropped) == (5, 2)
    assert not client.close(0.1)


def test_oversize_finding_is_dropped_and_counted(tmp_path: Path, make_finding: MakeFinding) -> None:
    client = Client(socket_path(tmp_path))
    assert not client.offer(make_finding(1, segments=12_000))
    assert client.stats().dropped == 1
    assert client.close(1)


def test_close_gives_up_in_time_when_nobody_listens(tmp_path: Path, make_finding: MakeFinding) -> None:
    client = Client(socket_path(tmp_path))
    client.offer(make_finding(1))
    start = time.monotonic()
    assert not client.close(0.3)
    assert time.monotonic() - start < 10
    assert not client.offer(make_finding(2))
    stats = client.stats()
    assert stats.offered == stats.acked + stats.dropped + stats.pending == 2


def test_series_are_bounded(tmp_path: Path, start_exporter: StartExporter) -> None:
    start_exporter()
    client = Client(socket_path(tmp_path))
    for n in range(1023):
        client.count("requests", service=f"s{n}")
    assert client.close(20)
    assert query(tmp_path, "SELECT count(*), sum(value) FROM counters") == [(1001, 1023)]
    assert query(tmp_path, "SELECT value FROM counters WHERE label = 'other'") == [(23,)]


def test_a_full_disk_is_told_to_the_collector(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding, wait_for: WaitFor
) -> None:
    start_exporter()
    client = Client(socket_path(tmp_path), capacity=30)
    assert client.offer(make_finding(0))
    wait_for(lambda: client.stats().acked == 1)
    blocker = sqlite3.connect(tmp_path / "state" / "whyspan.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # stands for any reason not to be able to write
    for n in range(1, 51):
        client.offer(make_finding(n))
        time.sleep(0.001)
    wait_for(lambda: client.stats().exporter_state == "store: database is locked")
    assert client.stats().acked == 1
    blocker.execute("COMMIT")
    blocker.close()
    wait_for(lambda: client.stats().exporter_state == "")
    assert client.close(20)
    stats = client.stats()
    assert (stats.offered, stats.acked + stats.dropped) == (51, 51)
    assert query(tmp_path, "SELECT count(*) FROM findings") == [(stats.acked,)]


def test_another_bound_holds_from_the_next_finding_on(tmp_path: Path, make_finding: MakeFinding) -> None:
    client = Client(socket_path(tmp_path), capacity=20)
    assert all(client.offer(make_finding(n)) for n in range(20))
    client.resize(5)
    assert client.offer(make_finding(20)) is False
    assert client.stats().pending == 5
    client.resize(30)
    assert all(client.offer(make_finding(n)) for n in range(25))
    client.close(0.0)
