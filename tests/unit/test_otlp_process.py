"""OTLP from the exporter process: the environment alone, acknowledgements, privileges, the end, and the status line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from whyspan import cli
from whyspan.model import Finding
from whyspan_exporters import link
from whyspan_exporters.exporter import Exporter
from whyspan_exporters.link import FindingMsg, Hello, StatusMsg
from whyspan_exporters.reader import Reader
from whyspan_exporters.records import EXPORTER, Record, Status
from whyspan_exporters.store import Store

from tests.unit.receivers import RECEIVERS, GrpcReceiver, Receiver, wait_until

MakeFinding = Callable[..., Finding]
StartExporter = Callable[..., "subprocess.Popen[bytes]"]
PROTOCOLS = list(RECEIVERS)


pytestmark = pytest.mark.usefixtures("no_otel_environment")


class Collector:
    """The collector's side of the link: sends, and waits for acknowledgements."""

    def __init__(self, state: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(20)
        self._sock.connect(str(state / "exporter.sock"))
        self._frames = link.Frames()
        self._acked = 0
        self.send(Hello(link.PROTOCOL, "i"))

    def send(self, *messages: link.ToExporter) -> None:
        self._sock.sendall(b"".join(link.encode(m) for m in messages))

    def until(self, seq: int) -> None:
        while self._acked < seq:
            data = self._sock.recv(65536)
            assert data, "closed by the exporter"
            for body in self._frames.feed(data):
                self._acked = link.decode_to_collector(body).seq


def use(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """Switch OTLP on as an operator would: by the environment, and nothing else."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    protocol = "grpc" if isinstance(receiver, GrpcReceiver) else "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")


def otlp_status(state: Path) -> dict[str, Any]:
    reader = Reader(state / "whyspan.db")
    try:
        status = reader.exporter_status()
        assert reader.status() != status or not status  # never taken for the collector's
        found: dict[str, Any] = status.get("sinks", {}).get("otlp", {})
        return found
    finally:
        reader.close()


def test_the_environment_alone_is_enough(
    tmp_path: Path,
    start_exporter: StartExporter,
    make_finding: MakeFinding,
    monkeypatch: pytest.MonkeyPatch,
    receiver: Receiver,
) -> None:
    use(monkeypatch, receiver)
    process = start_exporter()
    collector = Collector(tmp_path / "state")
    collector.send(
        *(FindingMsg(n, make_finding(n)) for n in range(1, 24)), StatusMsg(24, {"open_requests": 7})
    )
    collector.until(24)
    wait_until(lambda: len(receiver.spans()) == 23 * 4)
    wait_until(lambda: "whyspan.request.open" in receiver.newest_metrics())
    # Every thread gave up its capabilities, gRPC's included: they are a thread's, not a process's.
    tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
    assert len(tasks) > 2
    for task in tasks:
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        assert {fields[k] for k in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}, fields["Name"]
        assert fields["NoNewPrivs"] == "1"
    # What is still queued goes out at the end.
    collector.send(*(FindingMsg(n, make_finding(n)) for n in range(25, 48)))
    collector.until(47)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert len(receiver.spans()) == 46 * 4


def test_the_status_reaches_the_store(
    tmp_path: Path,
    start_exporter: StartExporter,
    make_finding: MakeFinding,
    monkeypatch: pytest.MonkeyPatch,
    receiver: Receiver,
) -> None:
    use(monkeypatch, receiver)
    start_exporter()
    collector = Collector(tmp_path / "state")
    collector.send(FindingMsg(1, make_finding(1)), FindingMsg(2, make_finding(2, sampled=False)))
    sent = iter(range(3, 10_000))

    def arrived() -> bool:
        collector.send(StatusMsg(next(sent), {"tgid": 1}))
        return bool(otlp_status(tmp_path / "state").get("traces", {}).get("sent"))

    wait_until(arrived)
    traces = otlp_status(tmp_path / "state")["traces"]
    expected = {"sent": 4, "failed": 0, "dropped": 0, "queued": 0, "kept_local": 1, "last_error": ""}
    assert {k: traces[k] for k in expected} == expected
    assert traces["endpoint"].startswith(receiver.endpoint)


@pytest.fixture(name="nobody", params=[(p, how) for p in PROTOCOLS for how in ("down", "silent")])
def nobody_fixture(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The section of a collector that is down, or takes connections and never answers."""
    protocol, how = request.param
    receiver = RECEIVERS[protocol]()
    receiver.delay_s = 1e6  # until it is stopped
    if how == "down":
        receiver.stop()
    yield {"endpoint": receiver.endpoint, "protocol": protocol, "metrics_interval_s": 0.2}
    if how == "silent":
        receiver.stop()


def test_without_a_collector_nothing_waits(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding, nobody: dict[str, Any]
) -> None:
    process = start_exporter(otlp=nobody)
    collector = Collector(tmp_path / "state")
    collector.send(*(FindingMsg(n, make_finding(n)) for n in range(1, 301)))
    collector.until(300)  # acknowledged: the store has them
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0  # by itself, not killed
    reader = Reader(tmp_path / "state" / "whyspan.db")
    assert len(reader.newest(limit=1000)) == 300
    reader.close()
    assert process.stderr is not None
    lines = process.stderr.read().decode().splitlines()
    assert lines[-1].endswith("stopped, everything received is committed")
    assert [line for line in lines if " whyspan" not in line] == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_kills_while_the_collector_is_away_lose_nothing(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding, protocol: str
) -> None:
    receiver = RECEIVERS[protocol]()
    receiver.stop()
    section = {"endpoint": receiver.endpoint, "protocol": protocol, "metrics": False, "timeout_s": 1}
    for first in (1, 101):
        process = start_exporter(otlp=section)
        collector = Collector(tmp_path / "state")
        collector.send(*(FindingMsg(n, make_finding(n)) for n in range(first, first + 100)))
        collector.until(first + 99)
        process.kill()
        process.wait()
    process = start_exporter(otlp=section)
    collector = Collector(tmp_path / "state")
    collector.send(*(FindingMsg(n, make_finding(n)) for n in range(201, 301)))
    collector.until(300)
    receiver = RECEIVERS[protocol](receiver.port)
    wait_until(lambda: len(receiver.spans()) >= 300 * 4)
    ids = [(s.trace_id, s.span_id) for s in receiver.spans()]
    assert len(set(ids)) == 300 * 4
    assert [int.from_bytes(t, "big") for t, _ in ids[::4]] == list(range(1, 301))  # in order, none twice
    process.terminate()
    assert process.wait(20) == 0
    receiver.stop()


def run_exporter(tmp_path: Path, otlp: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    overrides = {"run": {"state_dir": str(tmp_path / "state")}, "otlp": otlp}
    env = os.environ | {"WHYSPAN_OVERRIDES": json.dumps(overrides), "WHYSPAN_CONFIG": "/dev/null"}
    return subprocess.run(
        [sys.executable, "-m", "whyspan_exporters.exporter"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_wrong_file_stops_with_one_line(tmp_path: Path) -> None:
    done = run_exporter(tmp_path, {"endpoint": "collector:4317"})
    assert done.returncode == 2  # fatal: `whyspan run` does not restart it
    (line,) = done.stderr.splitlines()
    assert line.endswith("otlp.endpoint: 'collector:4317' must begin with http:// or https://")


def test_a_wrong_environment_is_reported_and_the_rest_goes_on(
    tmp_path: Path, start_exporter: StartExporter, make_finding: MakeFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(AssertionError, match="otlp: OTEL_EXPORTER_OTLP_PROTOCOL 'http/json' is not one of"):
        start_exporter()  # its first line is the complaint, not that it listens
    collector = Collector(tmp_path / "state")
    collector.send(FindingMsg(1, make_finding(1)))
    collector.until(1)
    assert "http/json" in otlp_status(tmp_path / "state")["problem"]


class Broken:
    """A sink with a bug in one method."""

    def emit(self, records: Sequence[Record]) -> None:
        pass

    def flush(self) -> str:
        return ""

    def status(self) -> dict[str, Any]:
        raise KeyError("bug")

    def close(self) -> None:
        pass


def test_a_sink_without_a_status_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "s.db", max_age_ns=10**18, max_bytes=64 << 20)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        Exporter(listener, {"broken": Broken(), "store": store})._flush()
    reader = Reader(tmp_path / "s.db")
    assert set(reader.exporter_status()["sinks"]) == {"store"}
    reader.close()
    store.close()
    assert [r.getMessage() for r in caplog.records] == ["sink broken failed"]


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `whyspan probes` on a store in which the exporter has said something."""
    monkeypatch.setenv("WHYSPAN_CONFIG", "/dev/null")
    monkeypatch.setenv("WHYSPAN_OVERRIDES", "")

    def call(exporter: dict[str, Any] | None, *args: str) -> tuple[int, str]:
        path = tmp_path / "s.db"
        store = Store(path, max_age_ns=10**18, max_bytes=64 << 20)
        store.emit([Status("i", {"events": 5})])
        assert store.flush() == ""
        if exporter is not None:
            store.emit([Status(EXPORTER, exporter)])
        store.close()
        with pytest.raises(SystemExit) as caught:
            cli.main(["probes", "--store", str(path), *args])
        out, _ = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out

    return call


TRACES = {
    "endpoint": "http://c:4317",
    "protocol": "grpc",
    "sent": 12345,
    "failed": 7,
    "dropped": 3,
    "failing": True,
    "last_error": "refused \x1b[31m",
    "last_error_unix_ns": 1_700_000_000_000_000_000,
    "queued": 2,
    "kept_local": 5,
}
METRICS = {"endpoint": "http://c:4318/v1/metrics", "protocol": "http/protobuf", "sent": 9, "interval_s": 60.0}
SPOOL = {"state": "", "batches": 3, "oldest_s": 75.2, "bytes": 3 << 19, "max_bytes": 256 << 20}


def otlp_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if not line.startswith("prometheus")]


def test_the_status_line_of_a_full_disk(run: Run) -> None:
    out = run({"sinks": {"otlp": {"spool": SPOOL | {"state": "disk full"}}}})[1]
    assert otlp_lines(out)[-1].endswith("256 MiB on disk; disk full, what comes waits in memory")


def test_the_status_line(run: Run) -> None:
    otlp = {"problem": "", "traces": TRACES, "metrics": METRICS, "spool": SPOOL}
    status, out = run({"sinks": {"store": {"state": ""}, "otlp": otlp}})
    assert status == 0
    assert otlp_lines(out)[-4:] == [
        "otlp traces: grpc to http://c:4317; 12,345 spans sent, 7 failed, 3 dropped, 2 queued; 5 requests kept local",
        "  failing, last error at 2023-11-14T22:13:20.000Z: refused \\x1b[31m",
        "otlp metrics: http/protobuf to http://c:4318/v1/metrics; 9 data points sent, 0 failed, 0 dropped, "
        "0 queued; an export every 60 s",
        "otlp spool: 3 batches, the oldest 75 s old; 1.5 of 256 MiB on disk",
    ]
    assert "5 events since the start" in out  # the collector's state is still found beside it


def test_the_status_line_when_it_is_off(run: Run) -> None:
    line = "otlp: off; set otlp.endpoint or OTEL_EXPORTER_OTLP_ENDPOINT to send spans and metrics"
    assert otlp_lines(run({"sinks": {"store": {}}})[1])[-1] == line


def test_no_status_line_without_an_exporter(run: Run) -> None:
    assert "otlp" not in run(None)[1]


def test_the_status_line_with_a_problem(run: Run) -> None:
    out = run({"sinks": {"otlp": {"problem": "OTEL_X 'y' is wrong"}}})[1]
    assert otlp_lines(out)[-3:] == [
        "otlp: OTEL_X 'y' is wrong",
        "otlp traces: off",
        "otlp metrics: off",
    ]


def test_the_status_as_json(run: Run) -> None:
    report = json.loads(run({"tgid": 7, "sinks": {"otlp": {"traces": TRACES}}}, "--json")[1])
    assert report["otlp"] == {"enabled": True, "traces": TRACES}
    assert (report["exporter"]["tgid"], report["status"]) == (7, {"events": 5})
    report = json.loads(run({"sinks": {"store": {}}}, "--json")[1])
    assert report["otlp"] == {"enabled": False}
