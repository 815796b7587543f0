"""The spool on disk: order, bound, exact totals, kills, full and damaged disks."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan_exporters.otlp import spool_file
from whyspan_exporters.otlp.spool import Spool
from whyspan_exporters.otlp.spool_file import Batch, Key, Parcel

from tests.unit.spoollab import Mutation, damaged_spool, flow, good_spool, mutate, read_all

MIB = 1 << 20
MakeSpool = Callable[..., Spool]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "spool.db"


def batch(n: int, signal: str = "traces", items: int = 3, size: int = 100) -> Batch:
    return Batch(signal, (b"%d " % n) * (size // 4), items, n)


def taken(spool: Spool, signal: str = "traces", items: int = 512) -> Parcel:
    parcel = spool.head(signal, items, MIB)
    assert parcel is not None
    return parcel


def test_in_order_by_signal_until_settled(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(1), batch(2, "metrics", items=50), batch(3)])
    spool.append([batch(4, items=5)])
    assert taken(spool, items=6).batches == (batch(1), batch(3))
    assert taken(spool, items=6).batches == (batch(1), batch(3))  # still there
    assert taken(spool, "metrics", items=1).items == 50  # one at least
    parcel = taken(spool, items=7)
    assert parcel.payload == batch(1).payload + batch(3).payload
    spool.settle("traces", parcel, sent=5, failed=1)
    assert taken(spool).batches == (batch(4, items=5),)
    assert flow(spool, "traces") == (11, 5, 1, 0, 5)
    assert flow(spool, "metrics") == (50, 0, 0, 0, 50)
    assert spool.oldest_unix_ns() == 2
    spool.settle("traces", taken(spool), sent=5, failed=0)
    assert spool.head("traces", 1, 1) is None


def test_bytes_bound_a_parcel(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n, size=2000) for n in range(4)])
    parcel = spool.head("traces", 512, 2500)
    assert parcel is not None
    assert len(parcel.batches) == 2


def test_everything_is_there_after_a_restart(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 8)])
    spool.settle("traces", taken(spool, items=6), sent=4, failed=2)
    spool.close()
    again = Spool(path, 16 * MIB)
    again.open()
    assert flow(again, "traces") == (21, 4, 2, 0, 15)
    assert taken(again).batches == tuple(batch(n) for n in range(3, 8))
    again.append([batch(8)])
    assert taken(again).batches[-1] == batch(8)


KILLED = """
import os, signal, sys
from pathlib import Path
from whyspan_exporters.otlp.spool import Spool
from whyspan_exporters.otlp.spool_file import Batch
spool = Spool(Path(sys.argv[1]), 16 << 20)
for n in range(1, 10_000):
    spool.append([Batch("traces", b"x" * 50_000, 7, n)])
    if n % 3 == 0:
        parcel = spool.head("traces", 7, 1)
        spool.settle("traces", parcel, sent=7, failed=0)
    os.write(1, b"%d\\n" % n)
"""


def test_nothing_committed_is_lost_by_a_kill_and_the_totals_are_exact(path: Path) -> None:
    offered = settled = 0
    for round_ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(40 + 7 * round_):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = process.stdout.read()  # what it wrote before the signal came
        process.wait()
        n = 40 + 7 * round_ + told.count("\n")
        spool = Spool(path, 16 * MIB)
        spool.open()
        total, sent, failed, dropped, queued = flow(spool, "traces")
        # Between a commit and its line there may be one more of each.
        assert total - offered in (7 * n, 7 * (n + 1))
        assert sent - settled in (7 * (n // 3), 7 * ((n + 1) // 3))
        assert (failed, dropped, total) == (0, 0, sent + queued)
        assert sum(b.items for b in read_all(spool)) == queued
        spool.close()
        offered, settled = total, total  # `read_all` settles what it reads


def test_at_the_bound_the_oldest_go_and_are_counted(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    largest = 0
    for n in range(1, 201):
        spool.append([batch(n, items=n, size=200_000)])
        largest = max(largest, spool.size_bytes())
    offered, sent, failed, dropped, queued = flow(spool, "traces")
    assert (offered, sent, failed) == (200 * 201 // 2, 0, 0)
    assert dropped + queued == offered
    left = [b.items for b in read_all(spool)]
    assert left == list(range(201 - len(left), 201))  # the newest, in order, without a gap
    assert sum(left) == queued
    assert len(left) > 40  # of 200 KB each, in 12 MiB
    assert largest <= 16 * MIB


def test_what_is_on_its_way_is_not_thrown_out(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n, items=1, size=200_000) for n in range(1, 11)])
    parcel = taken(spool, items=2)
    for n in range(11, 200):
        spool.append([batch(n, items=1, size=200_000)])
    offered, _, _, dropped, queued = flow(spool, "traces")
    assert dropped > 100
    spool.settle("traces", parcel, sent=2, failed=0)
    assert flow(spool, "traces") == (offered, 2, 0, dropped, queued - 2)
    assert taken(spool, items=1).batches[0].unix_ns == 3 + dropped


def test_other_signals_are_older_and_go_first(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(1, "metrics", items=9, size=100_000)])
    for n in range(2, 100):
        spool.append([batch(n, items=1, size=200_000)])
    assert flow(spool, "metrics") == (9, 0, 0, 9, 0)
    assert spool.head("metrics", 1, 1) is None


def fill_up(spool: Spool) -> Callable[[], None]:
    """Let the database not grow any more, as on a full disk; returns what ends that."""
    db = spool._connection()
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")

    def free() -> None:
        db.execute("PRAGMA max_page_count = 1073741823")

    return free


def test_a_full_disk_changes_nothing(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 8)])
    free = fill_up(spool)
    before = flow(spool, "traces")
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            spool.append([batch(8, size=100_000)])
    assert flow(spool, "traces") == before
    assert taken(spool).batches == tuple(batch(n) for n in range(1, 8))
    free()
    spool.append([batch(8, size=100_000)])
    assert [b.unix_ns for b in read_all(spool)] == list(range(1, 9))


def test_what_cannot_be_deleted_is_not_sent_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 8)])

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(spool_file, "write_totals", full)
        with pytest.raises(sqlite3.OperationalError):
            spool.settle("traces", taken(spool, items=6), sent=6, failed=0)
    assert flow(spool, "traces") == (21, 6, 0, 0, 15)
    assert taken(spool).batches[0].unix_ns == 3
    assert spool.oldest_unix_ns() == 3
    spool.append([batch(8)])  # writes what was not
    spool.close()
    again = Spool(path, 16 * MIB)
    again.open()
    assert flow(again, "traces") == (24, 6, 0, 0, 18)


def test_room_is_given_back(path: Path) -> None:
    spool = Spool(path, 64 * MIB)
    for n in range(100):
        spool.append([batch(n, size=300_000)])
    high = spool.size_bytes()
    read_all(spool)
    for n in range(20):
        spool.append([batch(n)])
        read_all(spool)
    spool.close()
    assert spool.size_bytes() < 200_000 < high


def damage(path: Path, sql: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(sql, values).rowcount != 0
    db.close()


@pytest.mark.parametrize(
    "what", ["payload = x'00'", "items = items + 1", "unix_ns = 0", "crc = crc + 1", "payload = 'text'"]
)
def test_a_damaged_batch_is_left_out_and_counted(path: Path, what: str) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 5)])
    spool.close()
    damage(path, f"UPDATE batches SET {what} WHERE seq IN (1, 3)")
    again = Spool(path, 16 * MIB)
    assert [b.unix_ns for b in read_all(again)] == [2, 4]
    offered, sent, failed, dropped, queued = flow(again, "traces")
    assert (sent, failed, queued) == (6, 0, 0)
    assert offered == sent + dropped
    if not what.startswith("items"):
        assert (offered, dropped) == (12, 6)


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER INSERT ON batches BEGIN DELETE FROM batches; END",
        "CREATE VIEW v AS SELECT 1",
        "DROP TABLE totals",
        "DROP INDEX batches_signal",
        "UPDATE totals SET items = -1",
        "UPDATE totals SET items = 9223372036854775807",
        "UPDATE totals SET items = 'many'",
        "UPDATE batches SET signal = x'ff00' WHERE seq = 1",
        "UPDATE batches SET seq = 9223372036854775807 WHERE seq = 1",
        "UPDATE batches SET seq = -7 WHERE seq = 1",
    ],
)
def test_a_file_that_is_not_ours_to_the_letter_is_made_anew(path: Path, sql: str) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 5)])
    spool.close()
    damage(path, sql)
    again = Spool(path, 16 * MIB)
    again.append([batch(5)])
    kept = [b.unix_ns for b in read_all(again)]
    assert kept in ([1, 2, 3, 4, 5], [2, 3, 4, 5], [5])  # a foreign schema is not read at all
    offered, sent, failed, dropped, queued = flow(again, "traces")
    assert offered == sent + failed + dropped + queued
    assert sorted(p.name for p in path.parent.iterdir()) == ["spool.db", "spool.db-wal"]


def test_rows_that_are_gone_are_counted(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 5)])
    spool.close()
    damage(path, "DELETE FROM batches WHERE seq < 3")
    again = Spool(path, 16 * MIB)
    again.open()
    assert flow(again, "traces") == (12, 0, 0, 6, 6)


def test_damage_while_it_is_open_costs_what_it_hits(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n, size=20_000) for n in range(1, 101)])
    db = spool._connection()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("PRAGMA cache_size = 0")
    db.execute("PRAGMA shrink_memory")
    pages = path.stat().st_size // spool_file.PAGE_BYTES
    with path.open("r+b") as file:
        for page in range(pages // 2, pages // 2 + 30):
            file.seek(page * spool_file.PAGE_BYTES)
            file.write(b"\xa5" * spool_file.PAGE_BYTES)
    kept = [b.unix_ns for b in read_all(spool)]
    assert kept == sorted(kept)
    assert len(kept) >= 60
    offered, sent, failed, dropped, queued = flow(spool, "traces")
    assert (offered, sent, failed, queued) == (300, 3 * len(kept), 0, 0)
    assert dropped == 300 - sent


def test_a_replacement_that_got_no_further_is_taken_up_again(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(n) for n in range(1, 5)])
    spool.close()
    spool_file.move(path, spool_file.aside(path))  # killed here
    again = Spool(path, 16 * MIB)
    assert [b.unix_ns for b in read_all(again)] == [1, 2, 3, 4]
    assert not spool_file.aside(path).exists()


def test_totals_of_another_kind_stay(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.count("traces", offered=5, dropped=5)
    spool.append([batch(1)])
    spool.close()
    again = Spool(path, 16 * MIB)
    again.count("traces", offered=2, dropped=2)  # before it is opened
    again.open()
    assert flow(again, "traces") == (10, 0, 0, 7, 3)
    assert spool_file.totals(again._connection())[Key("traces", "dropped")] == 5


def test_only_its_owner_reads_it(path: Path) -> None:
    spool = Spool(path, 16 * MIB)
    spool.append([batch(1)])
    assert [f.stat().st_mode & 0o777 for f in spool_file.files(path)] == [0o600, 0o600]


@settings(max_examples=80)
@given(st.data())
def test_any_damage_is_survived(data: st.DataObject) -> None:
    good = good_spool()
    mutations = data.draw(st.lists(st.from_type(Mutation), min_size=1, max_size=8))
    with tempfile.TemporaryDirectory() as folder:
        damaged_spool(Path(folder), mutate(good, mutations))
