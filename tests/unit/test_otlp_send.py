"""Sending to real receivers: what arrives, what is counted when it does not, and that nobody waits for it."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from whyspan import __version__
from whyspan.config import Otlp
from whyspan.model import Culprit, Finding, ProcessFact
from whyspan_exporters.otlp import outbox
from whyspan_exporters.otlp.sender import PACE
from whyspan_exporters.otlp.settings import resolve
from whyspan_exporters.otlp.sink import OtlpSink
from whyspan_exporters.records import Explained, finding_id

from tests.unit.conftest import build_finding
from tests.unit.receivers import RECEIVERS, GrpcReceiver, HttpReceiver, Receiver, Tap, values, wait_until

MakeFinding = Callable[..., Finding]
WaitFor = Callable[..., None]
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
START = 1_700_000_000_000_000_000
MS = 1_000_000
PROTOCOLS = list(RECEIVERS)


pytestmark = pytest.mark.usefixtures("no_otel_environment")


def protocol_of(receiver: Receiver) -> str:
    return "grpc" if isinstance(receiver, GrpcReceiver) else "http/protobuf"


MakeSink = Callable[..., OtlpSink]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PACE", PACE._replace(linger_s=0.02, first_s=0.05, last_s=0.1))


@pytest.fixture
def make_sink() -> Iterator[MakeSink]:
    """Make sinks without metrics, their spools in memory; closed at the end."""
    sinks: list[OtlpSink] = []

    def make(receiver: Receiver | None = None, env: dict[str, str] | None = None, **section: Any) -> OtlpSink:
        if receiver is not None:
            section = {"endpoint": receiver.endpoint, "protocol": protocol_of(receiver)} | section
        config = Otlp(**({"metrics": False} | section))
        sinks.append(OtlpSink(resolve(config, env or {}), config))
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.close()


def record(finding: Finding) -> Explained:
    return Explained(finding_id("i", finding), START, finding)


def send(sink: OtlpSink, *findings: Finding) -> None:
    """Hand over, as the exporter does."""
    sink.emit([record(f) for f in findings])
    assert sink.flush() == ""


def traces(sink: OtlpSink) -> dict[str, Any]:
    found: dict[str, Any] = sink.status()["traces"]
    return found


def plain(span: Span) -> dict[str, Any]:
    """All fields of a span, the set and the unset."""
    return {
        "trace_id": span.trace_id.hex(),
        "span_id_bytes": len(span.span_id),
        "trace_state": span.trace_state,
        "parent_span_id": span.parent_span_id.hex(),
        "flags": span.flags,
        "name": span.name,
        "kind": span.kind,
        "start": span.start_time_unix_nano - START,
        "end": span.end_time_unix_nano - START,
        "attributes": values(span.attributes),
        "dropped": (span.dropped_attributes_count, span.dropped_events_count, span.dropped_links_count),
        "events": [(e.time_unix_nano - START, e.name, values(e.attributes)) for e in span.events],
        "links": [
            (k.trace_id.hex(), k.span_id.hex(), k.trace_state, k.flags, values(k.attributes))
            for k in span.links
        ],
        "status": (span.status.code, span.status.message),
    }


def test_every_field_arrives(make_finding: MakeFinding, make_sink: MakeSink, receiver: Receiver) -> None:
    finding = make_finding(
        1,
        trace_id=TRACE,
        trace_id_source="traceparent",
        parent_span_id=CALLER,
        request_id="req-7",
        outcome="killed",
        ended_by="process_exit",
    )
    finding.process = ProcessFact(
        100, "python", "python3.11", "chat", "/k/c", vpid=9, container_id="cc", pod_uid="p"
    )
    finding.verdict.culprit = Culprit(kind="request", name="r", tgid=7, trace_id="ab" * 16, span_id="cd" * 8)
    sink = make_sink(receiver)
    sink.emit([record(finding)])
    assert sink.flush() == ""
    sink.close()
    (resource_spans,) = receiver.resource_spans()
    resource = values(resource_spans.resource.attributes)
    assert resource.pop("service.instance.id").count("-") == 4
    resource.pop("host.id", None)
    assert set(resource) - {"host.name", "host.arch"} == {
        "os.type",
        "service.name",
        "process.pid",
        "process.vpid",
        "process.executable.name",
        "process.linux.cgroup",
        "container.id",
        "k8s.pod.uid",
        "telemetry.distro.name",
        "telemetry.distro.version",
    }
    assert (resource["service.name"], resource["process.vpid"], resource["container.id"]) == ("chat", 9, "cc")
    assert resource_spans.resource.dropped_attributes_count == 0
    (scope,) = resource_spans.scope_spans
    assert (scope.scope.name, scope.scope.version, list(scope.scope.attributes)) == (
        "whyspan",
        __version__,
        [],
    )
    spans = {s.name: s for s in scope.spans}
    assert len(spans) == len(scope.spans) == 4
    request_id = spans["whyspan.request"].span_id.hex()
    usual = {
        "trace_id": TRACE,
        "span_id_bytes": 8,
        "trace_state": "",
        "kind": Span.SPAN_KIND_INTERNAL,
        "dropped": (0, 0, 0),
        "events": [],
        "links": [],
        "status": (0, ""),
    }
    below = usual | {"parent_span_id": request_id, "flags": 0x100}  # the parent is not remote
    assert plain(spans["whyspan.request"]) == usual | {
        "parent_span_id": CALLER,
        "flags": 0x300,  # the parent is remote
        "name": "whyspan.request",
        "start": 0,
        "end": 100 * MS,
        "status": (2, "Throttled for 33 ms by the quota of /demo/limited."),
        "attributes": {
            "http.request.method": "POST",
            "url.path": "/v1/completions",
            "http.response.status_code": 200,
            "http.response.body.size": 700,
            "http.request.header.x-request-id": ["req-7"],
            "error.type": "process_exit",
            "whyspan.ended_by": "process_exit",
            "thread.id": 100,
            "thread.name": "worker-0",
            "whyspan.finding_id": "i-c1-1",
            "whyspan.trace_id_source": "traceparent",
            "whyspan.outcome": "killed",
            "whyspan.slow": True,
            "whyspan.slow_reason": "objective",
            "whyspan.phase": "ttft",
            "whyspan.verdict": "cpu.throttled",
            "whyspan.sentence": "Throttled for 33 ms by the quota of /demo/limited.",
            "whyspan.ttft_ms": 40.0,
            "whyspan.accounted_ratio": 1.0,
            "whyspan.baseline_requests": 50,
            "whyspan.lost_events": 0,
            "whyspan.chunks": 7,
            "whyspan.cause_ms.cpu.throttled": 33.4,
            "whyspan.cause_ms.work.cpu": 33.3,
            "whyspan.cause_ms.work.timer": 33.3,
        },
    }
    assert plain(spans["whyspan.phase.ttft"]) == below | {
        "name": "whyspan.phase.ttft",
        "start": 0,
        "end": 40 * MS,
        "attributes": {"whyspan.phase": "ttft"},
    }
    assert plain(spans["whyspan.phase.stream"]) == below | {
        "name": "whyspan.phase.stream",
        "start": 40 * MS,
        "end": 100 * MS,
        "attributes": {"whyspan.phase": "stream"},
    }
    segment = {
        "whyspan.duration_ms": 33.333333,
        "whyspan.state": "throttled",
        "whyspan.detail": "quota 20 ms of 100 ms",
        "process.pid": 100,
        "thread.id": 101,
        "thread.name": "worker-1",
    }
    assert plain(spans["whyspan.cause.cpu.throttled"]) == below | {
        "name": "whyspan.cause.cpu.throttled",
        "start": 33_333_333,
        "end": 66_666_666,
        "events": [
            (33_333_333, "whyspan.evidence", {"whyspan.evidence": "2 throttled periods"}),
            (33_333_333, "whyspan.segment", segment),
        ],
        "links": [("ab" * 16, "cd" * 8, "", 0x300, {"whyspan.link": "culprit"})],
        "attributes": {
            "whyspan.cause": "cpu.throttled",
            "whyspan.primary": True,
            "whyspan.time_ms": 33.4,
            "whyspan.usual_ms": 0.0,
            "whyspan.excess_ms": 33.4,
            "whyspan.share": 0.91,
            "whyspan.confidence": 0.8,
            "whyspan.segments": 1,
            "whyspan.lost_events": 0,
            "whyspan.sentence": "Throttled for 33 ms by the quota of /demo/limited.",
            "whyspan.fix": "Raise the quota.",
            "whyspan.ruled_out": ["cpu.runqueue: no wait without throttling"],
            "whyspan.culprit.kind": "request",
            "whyspan.culprit.name": "r",
            "whyspan.culprit.pid": 7,
            "whyspan.culprit.trace_id": "ab" * 16,
            "whyspan.culprit.span_id": "cd" * 8,
            "process.pid": 100,
            "thread.id": 101,
            "thread.name": "worker-1",
        },
    }
    assert {k: traces(sink)[k] for k in ("sent", "failed", "dropped", "queued", "last_error")} == {
        "sent": 4,
        "failed": 0,
        "dropped": 0,
        "queued": 0,
        "last_error": "",
    }


def test_many_findings_arrive_once_and_whole(
    make_finding: MakeFinding, make_sink: MakeSink, receiver: Receiver, wait_for: WaitFor
) -> None:
    sink = make_sink(receiver)
    for n in range(1, 405, 101):
        sink.emit([record(make_finding(k)) for k in range(n, n + 101)])
        assert sink.flush() == ""
    wait_for(lambda: len(receiver.spans()) == 404 * 4 and not traces(sink)["queued"])
    spans = receiver.spans()
    assert len({s.span_id for s in spans}) == 1616
    assert {int(s.trace_id.hex(), 16) for s in spans} == set(range(1, 405))
    assert (traces(sink)["sent"], len(receiver.traces) < 20) == (1616, True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("source", ["file", "environment", "neither"])
def test_headers_and_compression(
    make_finding: MakeFinding,
    make_sink: MakeSink,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    source: str,
) -> None:
    receiver = RECEIVERS[protocol]()
    tap = Tap(receiver.port)
    section: dict[str, Any] = {"endpoint": f"http://127.0.0.1:{tap.port}", "protocol": protocol}
    env = {}
    if source == "file":
        section |= {"headers": {"X-Tenant": "a b"}, "compression": "gzip"}
    if source == "environment":
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": section.pop("endpoint"),
            "OTEL_EXPORTER_OTLP_PROTOCOL": section.pop("protocol"),
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=other",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-tenant=a%20b",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }
        for name, value in env.items():
            monkeypatch.setenv(name, value)
    sink = make_sink(env=env, **section)
    sink.emit([record(make_finding(1))])
    sink.close()
    assert len(receiver.spans()) == 4
    assert receiver.headers[0].get("x-tenant") == ("a b" if source != "neither" else None)
    assert (b"whyspan.phase.ttft" in tap.seen) is (source == "neither")  # on the wire in plain, or not
    tap.close()
    receiver.stop()


@pytest.mark.parametrize(
    ("section", "slow", "changes", "leaves"),
    [
        ({}, True, {}, True),
        ({}, False, {}, False),
        ({"export_ordinary": True}, False, {}, True),
        ({}, False, {"outcome": "error", "status": 500}, True),
        ({}, False, {"outcome": "reset"}, True),
        ({"export_ordinary": True}, True, {"outcome": "open"}, False),
        ({}, True, {"sampled": False}, False),
        ({"export_ordinary": True}, True, {"sampled": False}, False),
        ({"export_unsampled": True}, True, {"sampled": False}, True),
        ({"export_unsampled": True}, False, {"sampled": False}, False),
        ({"export_unsampled": True, "export_ordinary": True}, False, {"sampled": False}, True),
    ],
)
def test_what_leaves_the_host(
    make_sink: MakeSink, section: dict[str, Any], slow: bool, changes: dict[str, Any], leaves: bool
) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver, **section)
    sink.emit([record(build_finding(1, slow=slow, **changes)), record(build_finding(2))])
    sink.close()
    sent = {s.trace_id.hex() for s in receiver.spans()}
    assert sent == ({f"{1:032x}", f"{2:032x}"} if leaves else {f"{2:032x}"})
    assert traces(sink)["kept_local"] == (0 if leaves else 1)
    receiver.stop()


def test_a_request_reported_open_is_sent_when_it_ends(make_finding: MakeFinding, make_sink: MakeSink) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver)
    sink.emit([record(make_finding(1, outcome="open"))])
    assert sink.flush() == ""
    sink.emit([record(make_finding(1, end_ns=2_000_000_000 + 300 * MS))])  # the same id, at its end
    sink.close()
    assert [s.name for s in receiver.spans()].count("whyspan.request") == 1
    assert receiver.spans()[0].end_time_unix_nano == START + 300 * MS
    receiver.stop()


def test_what_is_sent_again_by_the_collector_goes_out_once(
    make_finding: MakeFinding, make_sink: MakeSink
) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver)
    for _ in range(3):
        sink.emit([record(make_finding(1)), record(make_finding(2))])
    sink.close()
    assert len(receiver.spans()) == 8
    receiver.stop()


def free_port() -> int:
    receiver = HttpReceiver()
    receiver.stop()
    return receiver.port


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_collector_down_then_up(
    make_finding: MakeFinding,
    make_sink: MakeSink,
    wait_for: WaitFor,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    sink = make_sink(endpoint=f"http://127.0.0.1:{port}", protocol=protocol, timeout_s=0.3)
    sink.emit([record(make_finding(1))])
    assert sink.flush() == ""  # no finding waits for the collector
    wait_for(lambda: traces(sink)["failing"])
    sink.emit([record(make_finding(2))])
    assert sink.flush() == ""
    state = traces(sink)
    assert (state["sent"], state["failed"], state["dropped"], state["queued"]) == (0, 0, 0, 8)
    assert "refused" in state["last_error"].lower()
    assert state["last_error_unix_ns"] > START
    receiver = RECEIVERS[protocol](port)
    wait_for(lambda: traces(sink)["sent"] == 8)
    assert [s.trace_id.hex() for s in receiver.spans()[::4]] == [f"{n:032x}" for n in (1, 2)]
    state = traces(sink)
    assert (state["failed"], state["queued"], state["failing"]) == (0, 0, False)
    assert state["last_error"]  # still there, with its time
    receiver.stop()
    # One line per change of state.
    wait_for(lambda: len([r for r in caplog.records if r.name == "whyspan.otlp"]) == 3)
    levels = [r.levelname for r in caplog.records if r.name == "whyspan.otlp"]
    assert levels == ["INFO", "WARNING", "INFO"]


def test_a_receiver_that_is_busy_is_tried_again(
    make_finding: MakeFinding, make_sink: MakeSink, receiver: Receiver, wait_for: WaitFor
) -> None:
    receiver.refuse = grpc.StatusCode.UNAVAILABLE if isinstance(receiver, GrpcReceiver) else 503
    sink = make_sink(receiver)
    send(sink, make_finding(1))
    wait_for(lambda: receiver.refused)
    receiver.refuse = None
    wait_for(lambda: traces(sink)["sent"] == 4)
    assert len(receiver.spans()) == 4
    assert traces(sink)["failed"] == 0


def test_a_receiver_that_refuses(
    make_finding: MakeFinding, make_sink: MakeSink, receiver: Receiver, wait_for: WaitFor
) -> None:
    receiver.refuse = grpc.StatusCode.UNAUTHENTICATED if isinstance(receiver, GrpcReceiver) else 401
    sink = make_sink(receiver)
    send(sink, make_finding(1))
    wait_for(lambda: traces(sink)["failed"] == 4)
    assert ("UNAUTHENTICATED" if isinstance(receiver, GrpcReceiver) else "401") in traces(sink)["last_error"]
    assert receiver.refused == 1


def test_a_redirect_is_not_followed_and_loses_nothing(
    make_finding: MakeFinding, make_sink: MakeSink, wait_for: WaitFor
) -> None:
    receiver = HttpReceiver()
    receiver.refuse = 308
    sink = make_sink(receiver)
    send(sink, make_finding(1))
    wait_for(lambda: traces(sink)["failing"])
    assert "308" in traces(sink)["last_error"]
    assert traces(sink)["queued"] == 4
    receiver.stop()


def test_a_slow_receiver_holds_nothing_up(
    make_finding: MakeFinding, make_sink: MakeSink, receiver: Receiver, wait_for: WaitFor
) -> None:
    receiver.delay_s = 1e6  # it answers when it is stopped, not before
    sink = make_sink(receiver)
    send(sink, *(make_finding(n) for n in range(1, 100)))
    wait_for(lambda: receiver.headers)
    for n in range(100, 400, 100):
        send(sink, *(make_finding(k) for k in range(n, n + 100)))
    expected = {"offered": 399 * 4, "sent": 0, "failed": 0, "dropped": 0, "queued": 399 * 4}
    assert {k: traces(sink)[k] for k in expected} == expected
    sink.close()  # returns although the receiver still holds the request
    assert {k: traces(sink)[k] for k in expected} == expected
    assert not receiver.traces


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key, and a certificate for 127.0.0.1 that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, pem = folder / "key.pem", folder / "cert.pem"
    usual = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    command = f"openssl req {usual} -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {pem}"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    return key, pem


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("trusted", ["file", "environment", "nobody"])
def test_tls(
    make_sink: MakeSink,
    monkeypatch: pytest.MonkeyPatch,
    certificate: tuple[Path, Path],
    protocol: str,
    trusted: str,
) -> None:
    receiver = RECEIVERS[protocol](0, certificate)
    # What is meant for other programs does not win over what is meant for this one.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", ssl.get_default_verify_paths().cafile or "")
    env = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificate[1])} if trusted == "environment" else {}
    section = {"certificate": str(certificate[1])} if trusted == "file" else {}
    sink = make_sink(env=env, endpoint=receiver.endpoint, protocol=protocol, timeout_s=2, **section)
    send(sink, build_finding(1))
    if trusted == "nobody":
        wait_until(lambda: traces(sink)["failing"])
        assert "certificate" in traces(sink)["last_error"].lower()
        assert not receiver.spans()
    else:
        wait_until(lambda: traces(sink)["sent"] == 4)
        assert len(receiver.spans()) == 4
    receiver.stop()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_credential_is_shown(
    make_finding: MakeFinding,
    make_sink: MakeSink,
    wait_for: WaitFor,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    port = free_port()
    sink = make_sink(
        endpoint=f"http://user:passw0rd@127.0.0.1:{port}",
        protocol=protocol,
        timeout_s=0.3,
        headers={"authorization": "Bearer s3cret\nvalue"},  # HTTP libraries quote what they refuse
    )
    send(sink, make_finding(1))
    wait_for(lambda: traces(sink)["failing"])

    def ours() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.startswith("whyspan")]

    wait_for(lambda: len(ours()) == 2)  # where it sends, and that it cannot
    everything = str([sink.status(), ours()])
    assert "s3cret" not in everything
    assert "passw0rd" not in everything
    assert traces(sink)["last_error"].isprintable()
