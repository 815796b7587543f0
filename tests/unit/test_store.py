"""The store: idempotent, bounded, patient with a full disk, and safe when its process is killed."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from whyspan.errors import StoreError
from whyspan.model import EngineFacts, Finding
from whyspan_exporters import link, schema
from whyspan_exporters.endpoint import Endpoint
from whyspan_exporters.link import Count, CountMsg, FindingMsg, Hello, StatusMsg
from whyspan_exporters.reader import Reader
from whyspan_exporters.records import Counts, Explained, Status, finding_id
from whyspan_exporters.store import Store

MakeFinding = Callable[..., Finding]
DAY_NS = 86_400_000_000_000
NOW = 1_800_000_000_000_000_000


def new_store(path: Path, max_bytes: int = 64 << 20, max_pending: int = 1024, now: int = NOW) -> Store:
    return Store(path, max_age_ns=DAY_NS, max_bytes=max_bytes, max_pending=max_pending, now=lambda: now)


def record(finding: Finding, start: int = 0) -> Explained:
    return Explained(finding_id("i", finding), start or NOW + finding.request.start_ns, finding)


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def test_round_trip(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "new" / "s.db"
    store = new_store(path)
    findings = [
        make_finding(1),
        make_finding(2, slow=False),
        make_finding(3, cause="io.log_blocked", service="b"),
    ]
    store.emit([record(f) for f in findings])
    assert store.flush() == ""
    reader = Reader(path)  # beside the open writer
    assert [s.finding for s in reader.newest()] == [findings[2], findings[0]]
    assert [s.finding for s in reader.newest(ordinary=True)] == findings[::-1]
    assert [s.finding for s in reader.newest(service="b")] == [findings[2]]
    assert [s.finding for s in reader.newest(cause="cpu")] == [findings[0]]
    assert [s.finding for s in reader.newest(cause="cpu.throttled")] == [findings[0]]
    assert reader.newest(cause="cpu.t") == []
    assert [s.finding for s in reader.newest(since_unix_ns=NOW + findings[2].request.start_ns)] == [
        findings[2]
    ]
    reader.close()
    store.close()
    assert Reader(path).newest(limit=1)[0].finding == findings[2]


def test_resends_change_nothing(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store = new_store(path)
    for value in (3, 5):
        store.emit([record(make_finding(n)) for n in range(23)])
        store.emit([Counts("i", [Count("requests", "chat", "200", value)]), Status("i", {"v": value})])
        assert store.flush() == ""
    store.close()
    assert rows(path, "SELECT count(*) FROM findings") == [(23,)]
    assert rows(path, "SELECT instance, name, service, label, value FROM counters") == [
        ("i", "requests", "chat", "200", 5)
    ]
    assert rows(path, "SELECT instance, status FROM status") == [("i", '{"v": 5}')]


def test_columns_have_their_meaning(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store = new_store(path)
    store.emit([record(make_finding(1, request_id="r1", first_ns=0, status=0)), record(make_finding(2))])
    store.close()
    assert rows(
        path,
        "SELECT id, trace_id, service, request_id, latency_ns, ttft_ns, status, slow, cause"
        " FROM findings ORDER BY id",
    ) == [
        ("i-c1-1", f"{1:032x}", "chat", "r1", 100_000_000, None, 0, 1, "cpu.throttled"),
        ("i-c2-2", f"{2:032x}", "chat", "", 100_000_000, 40_000_000, 200, 1, "cpu.throttled"),
    ]


def test_broken_numbers_do_not_stop_the_others(tmp_path: Path, make_finding: MakeFinding) -> None:
    store = new_store(tmp_path / "s.db")
    store.emit([record(make_finding(1), start=1 << 70), record(make_finding(2))])
    assert store.flush() == ""
    assert len(Reader(tmp_path / "s.db").newest()) == 2
    store.close()


def test_size_is_bounded_and_the_oldest_go(tmp_path: Path, make_finding: MakeFinding) -> None:
    path, limit = tmp_path / "s.db", 4 << 20
    store = new_store(path, limit)
    biggest = 0
    for n in range(0, 2048, 64):
        store.emit([record(make_finding(i, segments=60)) for i in range(n, n + 64)])
        assert store.flush() == ""
        biggest = max(biggest, sum(f.stat().st_size for f in tmp_path.iterdir() if f.name != "s.db-shm"))
    store.close()
    kept = [int(str(t), 16) for (t,) in rows(path, "SELECT trace_id FROM findings ORDER BY start_unix_ns")]
    assert limit // 2 < biggest <= limit
    assert 64 < len(kept) < 1900
    assert kept == list(range(2048 - len(kept), 2048))


def test_a_smaller_bound_shrinks_the_file(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store = new_store(path)
    store.emit([record(make_finding(i, segments=60)) for i in range(1000)])
    store.close()
    before = path.stat().st_size
    new_store(path, 4 << 20).close()
    assert path.stat().st_size <= 4 << 20 < before


def test_age_is_bounded(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store = new_store(path)
    store.emit(
        [record(make_finding(1), start=NOW - DAY_NS - 1), record(make_finding(2), start=NOW - DAY_NS + 1)]
    )
    store.emit([Counts("old", [Count("requests", "", "", 1)]), Status("old", {})])
    store.close()
    new_store(path, now=NOW + DAY_NS // 2).close()
    assert rows(path, "SELECT count(*) FROM findings") == [(0,)]
    assert rows(path, "SELECT count(*) FROM counters") == [(1,)]
    new_store(path, now=NOW + 2 * DAY_NS).close()
    assert rows(path, "SELECT (SELECT count(*) FROM counters), (SELECT count(*) FROM status)") == [(0, 0)]


def test_other_versions_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    new_store(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    for attempt in (new_store, Reader):
        with pytest.raises(StoreError, match="version 99"):
            attempt(path)
    path.write_text("not a database, but long enough to be looked at" * 100)
    for attempt in (new_store, Reader):
        with pytest.raises(StoreError, match="not a database"):
            attempt(path)
    with pytest.raises(StoreError, match="no store at"):
        Reader(tmp_path / "none.db")


#: The tables as whyspan 0.3 made them.
VERSION_1 = """
CREATE TABLE findings (
    id TEXT PRIMARY KEY,
    trace_id TEXT NOT NULL,
    service TEXT NOT NULL,
    request_id TEXT NOT NULL,
    start_unix_ns INTEGER NOT NULL,
    latency_ns INTEGER NOT NULL,
    ttft_ns INTEGER,
    status INTEGER NOT NULL,
    slow INTEGER NOT NULL,
    cause TEXT NOT NULL,
    finding BLOB NOT NULL
);
CREATE INDEX findings_start ON findings (start_unix_ns);
CREATE INDEX findings_slow ON findings (slow, start_unix_ns);
CREATE INDEX findings_trace ON findings (trace_id);
CREATE INDEX findings_request ON findings (request_id) WHERE request_id != '';
CREATE TABLE counters (
    instance TEXT NOT NULL,
    name TEXT NOT NULL,
    service TEXT NOT NULL,
    label TEXT NOT NULL,
    value INTEGER NOT NULL,
    updated_unix_ns INTEGER NOT NULL,
    PRIMARY KEY (instance, name, service, label)
) WITHOUT ROWID;
CREATE TABLE status (
    instance TEXT PRIMARY KEY,
    updated_unix_ns INTEGER NOT NULL,
    status TEXT NOT NULL
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""


def old_store(path: Path, finding: Finding) -> None:
    """A store of version 1 with a finding as it was then, without what an engine says."""
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(finding))
    del told["phases"], told["engine"], told["request"]["client_port"], told["request"]["server_port"]
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript("PRAGMA page_size = 4096; PRAGMA auto_vacuum = INCREMENTAL;")
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(f"BEGIN; {VERSION_1} COMMIT;")
    r = finding.request
    row = (
        r.trace_id,
        r.service,
        r.request_id,
        NOW,
        finding.wall_ns,
        None,
        r.status,
        1,
        finding.verdict.cause,
    )
    db.execute(
        "INSERT INTO findings VALUES ('old-1', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, msgspec.msgpack.encode(told)),
    )
    db.execute("INSERT INTO counters VALUES ('old', 'requests', 'chat', 'ok', 7, ?)", (NOW,))
    db.close()


def layout(path: Path) -> dict[str, list[str]]:
    """Column names by table, and the names of the indices."""
    tables = [str(n) for (n,) in rows(path, "SELECT name FROM sqlite_schema WHERE type = 'table'")]
    out: dict[str, list[str]] = {
        n: [str(c[1]) for c in rows(path, f"PRAGMA table_info({n})")] for n in tables
    }
    indices = rows(path, "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL")
    out["indices"] = sorted(f"{name}: {sql}" for name, sql in indices)
    out["version"] = [str(rows(path, "PRAGMA user_version")[0][0])]
    return out


def test_an_old_store_is_brought_up_to_date(tmp_path: Path, make_finding: MakeFinding) -> None:
    path, fresh = tmp_path / "s.db", tmp_path / "fresh.db"
    finding = make_finding(1, request_id="req-1")
    old_store(path, finding)
    new_store(fresh).close()
    store = new_store(path)
    assert layout(path) == layout(fresh)
    new = make_finding(2)
    new.engine = EngineFacts(request_id="cmpl-2-0")
    store.emit([record(new)])
    assert store.flush() == ""
    store.close()
    reader = Reader(path)
    assert [s.finding for s in reader.find("req-1")] == [finding]
    assert [s.finding for s in reader.find("0" * 31 + "1")] == [finding]
    assert [s.finding for s in reader.find("cmpl-2-0")] == [new]
    assert {s.finding.request.seq for s in reader.newest()} == {1, 2}
    reader.close()
    assert rows(path, "SELECT value FROM counters") == [(7,)]
    new_store(path).close()  # once is enough
    assert rows(path, "SELECT count(*) FROM findings") == [(2,)]


def test_an_old_store_is_read_as_it_is(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    finding = make_finding(1, request_id="req-1")
    old_store(path, finding)
    reader = Reader(path)
    for name in ("old-1", "req-1", "0000"):
        assert [s.finding for s in reader.find(name)] == [finding]
    assert reader.find("cmpl") == []
    # A writer comes while it is open.
    new_store(path).close()
    assert [s.finding for s in reader.find("req-1")] == [finding]
    assert [s.finding for s in reader.newest()] == [finding]
    reader.close()
    assert rows(path, "PRAGMA user_version") == [(schema.VERSION,)]


def test_an_upgrade_that_fails_leaves_the_old_store(
    tmp_path: Path, make_finding: MakeFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    old_store(path, make_finding(1))
    before = layout(path)
    broken = {1: schema.UPGRADES[1].replace("PRAGMA", "CREATE TABLE counters (x); PRAGMA")}
    monkeypatch.setattr(schema, "UPGRADES", broken)
    with pytest.raises(StoreError, match="cannot open the store"):
        new_store(path)
    assert layout(path) == before


def test_an_engines_request_is_found(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store = new_store(path)
    ids = {1: "cmpl-aaaa1-0", 2: "cmpl-aaaa2-0", 3: "", 4: "00000000000000000000000000000001-0", 5: "%_'\"é"}
    for n, engine_id in ids.items():
        finding = make_finding(n)
        finding.engine = EngineFacts(request_id=engine_id)
        store.emit([record(finding)])
    store.emit([record(make_finding(6))])
    store.close()
    reader = Reader(path)

    def found(name: str) -> list[int]:
        return sorted(s.finding.request.seq for s in reader.find(name))

    assert found("cmpl-aaaa1-0") == found("cmpl-aaaa1") == [1]
    assert found("cmpl-aaaa") == found("cmpl") == [1, 2]
    assert found("CMPL-aaaa") == found("cmp") == found("") == found("%_%%") == found("cmpl-aaaa1-0 ") == []
    assert found("%_'\"") == found("%_'\"é") == [5]
    # Nobody knows which is meant: the trace of one, the engine's id of another. A whole trace id is clear.
    assert found("0" * 31) == [1, 2, 3, 4, 5, 6]
    assert found("0" * 31 + "1") == [1]
    assert found("0" * 31 + "1-") == [4]
    assert found("\ud800abcd") == []
    reader.close()
    plans = [
        str(rows(path, f"EXPLAIN QUERY PLAN SELECT id FROM findings WHERE {where}"))
        for where in (
            "engine_request = 'x' AND engine_request != ''",
            "request_id = 'x' AND request_id != ''",
            "(trace_id >= 'a' AND trace_id < 'b') OR (engine_request >= 'a' AND engine_request < 'b')",
        )
    ]
    assert not any("SCAN" in plan for plan in plans)


def test_mode_is_0640_and_so_is_the_log(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "dir" / "s.db"
    store = new_store(path)
    store.emit([record(make_finding(1))])
    store.flush()
    modes = {f.name: stat.S_IMODE(f.stat().st_mode) for f in path.parent.iterdir()}
    store.close()
    assert modes == {"s.db": 0o640, "s.db-wal": 0o640, "s.db-shm": 0o640}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files to a group")
def test_the_group_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_finding: MakeFinding
) -> None:
    monkeypatch.setattr("grp.getgrnam", lambda name: SimpleNamespace(gr_gid=4242))
    path = tmp_path / "dir" / "s.db"
    with Endpoint(path.with_name("exporter.sock")):  # makes the folder, as in the real process
        store = new_store(path)
        store.emit([record(make_finding(1))])
        store.flush()
        groups = {f.name: f.stat().st_gid for f in [path.parent, *path.parent.iterdir()]}
        store.close()
    assert {n for n, gid in groups.items() if gid == 4242} == {
        "dir",
        "exporter.sock",  # the collector may be another user of it; whoever else connects is sent away
        "s.db",
        "s.db-wal",
        "s.db-shm",
    }
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 1 MiB of memory as a disk; needs the right to mount."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_a_state_not_a_crash(
    tiny_disk: Path, make_finding: MakeFinding, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tiny_disk / "s.db"
    store = new_store(path, max_pending=100)
    ballast = tiny_disk / "ballast"
    store.emit([record(make_finding(0))])
    assert store.flush() == ""
    with ballast.open("wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
        while True:
            f.write(b"x" * 4096)
    store.emit([record(make_finding(n, segments=60)) for n in range(1, 51)])
    for _ in range(3):
        assert store.flush() == "disk full"
    assert [s.finding.request.seq for s in Reader(path).newest()] == [0]  # still readable
    store.emit([record(make_finding(n)) for n in range(51, 108)])
    assert store.flush() == "disk full"
    assert store.dropped == 7
    ballast.unlink()
    assert store.flush() == ""
    store.close()
    assert rows(path, "SELECT count(*) FROM findings") == [(1 + 100,)]
    assert rows(path, "SELECT value FROM counters WHERE name = 'store_dropped'") == [(7,)]
    assert len([r for r in caplog.records if "disk full" in r.getMessage()]) == 1


def test_full_database_without_root(tmp_path: Path, make_finding: MakeFinding) -> None:
    store = new_store(tmp_path / "s.db")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    store.emit([record(make_finding(n, segments=60)) for n in range(20)])
    assert (store.flush(), store.state) == ("disk full", "disk full")
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert (store.flush(), store.state) == ("", "")
    store.close()
    assert rows(tmp_path / "s.db", "SELECT count(*) FROM findings") == [(20,)]


class Peer:
    """A collector made of a socket."""

    def __init__(self, state: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(state / "exporter.sock"))
        self.frames = link.Frames()
        self.acked = 0

    def send(self, *messages: link.ToExporter) -> None:
        self.sock.sendall(b"".join(link.encode(m) for m in messages))

    def until(self, seq: int) -> None:
        while self.acked < seq:
            data = self.sock.recv(65536)
            assert data, "closed by the exporter"
            for body in self.frames.feed(data):
                self.acked = link.decode_to_collector(body).seq


StartExporter = Callable[..., "subprocess.Popen[bytes]"]


def stored_seqs(state: Path) -> list[int]:
    return sorted(int(str(t), 16) for (t,) in rows(state / "whyspan.db", "SELECT trace_id FROM findings"))


def test_everything_acknowledged_survives_sigkill(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding
) -> None:
    process = start_exporter()
    peer = Peer(tmp_path / "state")
    peer.send(Hello(link.PROTOCOL, "i"), *(FindingMsg(n, make_finding(n)) for n in range(1, 200)))
    peer.until(100)
    process.kill()
    process.wait()
    stored = stored_seqs(tmp_path / "state")
    assert peer.acked >= 100
    assert stored[: peer.acked] == list(range(1, peer.acked + 1))


def test_sigterm_commits_what_was_received(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding
) -> None:
    process = start_exporter()
    peer = Peer(tmp_path / "state")
    peer.send(Hello(link.PROTOCOL, "i"), FindingMsg(1, make_finding(1)))
    peer.until(1)
    peer.send(*(FindingMsg(n, make_finding(n)) for n in range(2, 25)), StatusMsg(25, {"a": 1}))
    process.send_signal(signal.SIGTERM)
    peer.until(25)
    assert process.wait(20) == 0
    assert stored_seqs(tmp_path / "state") == list(range(1, 25))
    assert not (tmp_path / "state" / "exporter.sock").exists()


def test_a_lone_finding_is_committed_soon(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding
) -> None:
    start_exporter()
    peer = Peer(tmp_path / "state")
    peer.send(Hello(link.PROTOCOL, "i"), FindingMsg(1, make_finding(1)))
    peer.send(CountMsg(2, [Count("lost", "", "sched_wake", 3)]))
    peer.until(2)
    assert stored_seqs(tmp_path / "state") == [1]
    assert rows(tmp_path / "state" / "whyspan.db", "SELECT name, label, value FROM counters") == [
        ("lost", "sched_wake", 3)
    ]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x01\xc1",
        link.encode(StatusMsg(1, {})),  # without a hello
        link.encode(Hello(99, "i")),
    ],
)
def test_garbage_closes_the_connection_with_one_line(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding, garbage: bytes
) -> None:
    process = start_exporter()
    bad = Peer(tmp_path / "state")
    bad.sock.sendall(garbage)
    assert bad.sock.recv(1) == b""
    good = Peer(tmp_path / "state")
    good.send(Hello(link.PROTOCOL, "i"), FindingMsg(1, make_finding(1)))
    good.until(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert process.stderr is not None
    lines = process.stderr.read().decode().splitlines()
    assert len([line for line in lines if "WARNING" in line]) == 1


def test_a_second_exporter_is_refused(tmp_path: Path, start_exporter: StartExporter) -> None:
    start_exporter()
    env = os.environ | {"WHYSPAN_OVERRIDES": f'{{"run": {{"state_dir": "{tmp_path}/state"}}}}'}
    done = subprocess.run(
        [sys.executable, "-m", "whyspan_exporters.exporter"],
        env=env,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert b"another exporter uses" in done.stderr
    Peer(tmp_path / "state").send(Hello(link.PROTOCOL, "i"))  # the first one still listens


def test_the_exporter_holds_no_privilege(start_exporter: StartExporter) -> None:
    process = start_exporter()
    status = Path(f"/proc/{process.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert fields["NoNewPrivs"] == "1"
    assert {fields[k] for k in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    if os.geteuid() == 0:
        assert fields["CapBnd"] == "0" * 16
