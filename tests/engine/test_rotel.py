"""A real OpenTelemetry collector, `rotel`, takes what is sent, prints it, and passes it on unchanged."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from whyspan.config import Otlp
from whyspan.model import Culprit
from whyspan_exporters.otlp.resource import Resources
from whyspan_exporters.otlp.settings import resolve
from whyspan_exporters.otlp.sink import OtlpSink
from whyspan_exporters.otlp.spans import to_spans
from whyspan_exporters.records import Explained, Status, finding_id

from tests.bench.ports import free_port
from tests.conftest import required_tiers
from tests.unit.conftest import build_finding
from tests.unit.receivers import RECEIVERS, GrpcReceiver, wait_until

FINDINGS = 23
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
START = 1_700_000_000_000_000_000


def program() -> Path:
    """The collector's program, or a skip that says what it lacks."""
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        return lacking("needs the package rotel, which exists for CPython 3.11 on x86-64")
    path = Path(spec.origin).with_name("rotel-agent")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        return lacking(
            f"rotel does not start, it needs the package libpython3.11: {done.stderr.strip()[:200]}"
        )
    return path


def lacking(reason: str) -> Path:
    if "engine" in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Rotel:
    """One collector on two ports, which prints every span and metric and passes them to *onward*."""

    def __init__(self, folder: Path, onward: GrpcReceiver) -> None:
        self.ports = {"grpc": free_port(), "http/protobuf": free_port()}
        self._folder, self._onward, self._program = folder, onward, program()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = {
            "otlp-grpc-endpoint": f"127.0.0.1:{self.ports['grpc']}",
            "otlp-http-endpoint": f"127.0.0.1:{self.ports['http/protobuf']}",
            "exporter": "otlp",
            "otlp-exporter-endpoint": self._onward.endpoint,
            "otlp-exporter-protocol": "grpc",
            "debug-log-verbosity": "detailed",
            "pid-file": self._folder / "pid",
            "log-file": self._folder / "log",
        }
        command = [str(self._program), "start", "--debug-log", "traces", "--debug-log", "metrics"]
        command += [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        with (self._folder / "out").open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        for port in self.ports.values():
            wait_until(lambda port=port: self._listens(port))

    def _listens(self, port: int) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.printed()
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def printed(self) -> str:
        return (self._folder / "out").read_text(errors="replace")


@pytest.fixture
def rotel(tmp_path: Path) -> Iterator[tuple[Rotel, GrpcReceiver]]:
    """A running collector, and the receiver behind it."""
    onward = GrpcReceiver()
    running = Rotel(tmp_path, onward)
    try:
        running.start()
        yield running, onward
    finally:
        running.stop()
        onward.stop()


@pytest.fixture
def make_sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OtlpSink]]:
    """Make sinks; closed at the end."""
    for name in [n for n in os.environ if n.startswith("OTEL_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    sinks: list[OtlpSink] = []

    def make(rotel: Rotel, protocol: str, **section: Any) -> OtlpSink:
        endpoint = f"http://127.0.0.1:{rotel.ports[protocol]}"
        config = Otlp(endpoint=endpoint, protocol=protocol, metrics_interval_s=0.2, **section)
        sinks.append(OtlpSink(resolve(config, {}), config))
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.close()


def record(n: int) -> Explained:
    finding = build_finding(
        n,
        trace_id=f"{n:04x}{TRACE[4:]}",
        trace_id_source="traceparent",
        parent_span_id=CALLER,
        outcome="reset",
    )
    finding.verdict.culprit = Culprit(kind="request", name="r", trace_id=TRACE, span_id=CALLER)
    return Explained(finding_id("i", finding), START, finding)


@pytest.mark.parametrize("protocol", list(RECEIVERS))
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_real_collector_takes_it_all(
    rotel: tuple[Rotel, GrpcReceiver], make_sink: Callable[..., OtlpSink], protocol: str, compression: str
) -> None:
    collector, onward = rotel
    sink = make_sink(collector, protocol, compression=compression)
    records = [record(n) for n in range(1, FINDINGS + 1)]
    sink.emit([*records, Status("i", {"open_requests": 7, "cpu_s": 2.5})])
    assert sink.flush() == ""
    wait_until(lambda: len(onward.spans()) == FINDINGS * 4 and onward.metrics)
    # What it understood is what was meant, to the last field.
    resource = Resources()
    expected = encode_spans([s for r in records for s in to_spans(r, resource.of(r.finding))])
    sent = [s for r in expected.resource_spans for scope in r.scope_spans for s in scope.spans]
    by_id = {s.span_id: s for s in onward.spans()}
    assert {s.span_id: s for s in sent} == by_id
    assert {r.resource.SerializeToString() for r in onward.resource_spans()} == {
        r.resource.SerializeToString() for r in expected.resource_spans
    }
    printed = collector.printed()
    for r in records:
        assert printed.count(f"Trace ID       : {r.finding.request.trace_id}") == 4
    assert (
        printed.count("Name           : whyspan.request\n    Kind           : SPAN_KIND_INTERNAL") == FINDINGS
    )
    assert printed.count(f"Parent ID      : {CALLER}") == FINDINGS
    assert len(set(re.findall(r"-> Name: (whyspan\.\S+)\n     -> Description", printed))) >= 5
    assert sink.status()["traces"]["sent"] == FINDINGS * 4
    assert sink.status()["metrics"]["failed"] == 0


@pytest.mark.parametrize("protocol", list(RECEIVERS))
def test_the_collector_restarts(
    rotel: tuple[Rotel, GrpcReceiver], make_sink: Callable[..., OtlpSink], protocol: str
) -> None:
    collector, onward = rotel
    sink = make_sink(collector, protocol, timeout_s=0.5)

    def count(what: str) -> int:
        found: int = sink.status()["traces"][what]
        return found

    sink.emit([record(1)])
    assert sink.flush() == ""
    wait_until(lambda: len(onward.spans()) == 4)
    collector.stop()
    sink.emit([record(2)])
    assert sink.flush() == ""
    wait_until(lambda: sink.status()["traces"]["failing"])
    assert (count("queued"), count("failed"), count("dropped")) == (4, 0, 0)
    collector.start()
    sink.emit([record(3)])
    assert sink.flush() == ""
    wait_until(lambda: count("sent") == 12)
    wait_until(lambda: len(onward.spans()) == 12)  # what came while it was away too, in order
    numbers = [int(s.trace_id.hex()[:4], 16) for s in onward.spans()[::4]]
    assert numbers == [1, 2, 3]
