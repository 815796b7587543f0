"""What an answer means: statuses, retry-after, RetryInfo, partial success, mTLS; over both protocols, for real."""

from __future__ import annotations

import gzip
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from whyspan.clock import now_unix_ns
from whyspan.config import Otlp
from whyspan_exporters.otlp import transport
from whyspan_exporters.otlp.settings import Settings, Target, resolve
from whyspan_exporters.otlp.transport import Answer, Kind, Transport

from tests.unit.receivers import RECEIVERS, GrpcReceiver, HttpReceiver, Receiver, Tap, wait_until

pytestmark = pytest.mark.usefixtures("no_otel_environment")

MakeTransport = Callable[..., Transport]
CODE = grpc.StatusCode


def request(name: str = "x", spans: int = 1) -> bytes:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for _ in range(spans):
        scope.spans.add(name=name)
    return bytes(message.SerializeToString())


def target(receiver: Receiver, signal: str = "traces", **section: Any) -> Target:
    protocol = "grpc" if isinstance(receiver, GrpcReceiver) else "http/protobuf"
    usual: dict[str, Any] = {"endpoint": receiver.endpoint, "protocol": protocol, "timeout_s": 5}
    settings: Settings = resolve(Otlp(**(usual | section)), {})
    found = settings.traces if signal == "traces" else settings.metrics
    assert found is not None
    return found


@pytest.fixture
def make() -> Iterator[MakeTransport]:
    made: list[Transport] = []

    def call(receiver: Receiver, signal: str = "traces", **section: Any) -> Transport:
        made.append(transport.make(target(receiver, signal, **section)))
        return made[-1]

    yield call
    for t in made:
        t.close()


def test_taken_as_it_is(receiver: Receiver, make: MakeTransport) -> None:
    t = make(receiver, headers={"X-Tenant": "a"})
    assert t.send(request("one")) == Answer(Kind.TAKEN)
    # Requests one after the other are one request with the contents of all.
    assert t.send(request("two") + request("three", 2)) == Answer(Kind.TAKEN)
    assert [s.name for s in receiver.spans()] == ["one", "two", "three", "three"]
    assert receiver.headers[0]["x-tenant"] == "a"
    assert "whyspan/" in receiver.headers[0]["user-agent"]


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_partial_success(receiver: Receiver, make: MakeTransport, signal: str) -> None:
    receiver.partial = (7, "too many attributes")
    assert make(receiver, signal).send(b"") == Answer(Kind.TAKEN, "too many attributes", 7)
    receiver.partial = (0, "use a newer version")
    assert make(receiver, signal).send(b"") == Answer(Kind.TAKEN, "use a newer version", 0)


# https://opentelemetry.io/docs/specs/otlp/#failures-1
HTTP_STATUSES = {
    **dict.fromkeys((429, 502, 503, 504, 301, 307, 308), Kind.LATER),
    **dict.fromkeys((400, 401, 403, 404, 405, 408, 413, 415, 500, 501, 505), Kind.REFUSED),
    **dict.fromkeys((200, 202, 204), Kind.TAKEN),
}


@pytest.mark.parametrize(("status", "kind"), HTTP_STATUSES.items())
def test_http_statuses(make: MakeTransport, status: int, kind: Kind) -> None:
    receiver = HttpReceiver()
    receiver.refuse = status
    answer = make(receiver).send(request())
    receiver.stop()
    assert answer.kind is kind
    assert answer.smaller is (status in (400, 413))
    assert kind is Kind.TAKEN or str(status) in answer.reason


# https://opentelemetry.io/docs/specs/otlp/#failures
GRPC_CODES = {
    **dict.fromkeys(
        (
            CODE.CANCELLED,
            CODE.DEADLINE_EXCEEDED,
            CODE.ABORTED,
            CODE.OUT_OF_RANGE,
            CODE.UNAVAILABLE,
            CODE.DATA_LOSS,
        ),
        Kind.LATER,
    ),
    **dict.fromkeys(
        (
            CODE.UNKNOWN,
            CODE.INVALID_ARGUMENT,
            CODE.NOT_FOUND,
            CODE.ALREADY_EXISTS,
            CODE.PERMISSION_DENIED,
            CODE.UNAUTHENTICATED,
            CODE.FAILED_PRECONDITION,
            CODE.UNIMPLEMENTED,
            CODE.INTERNAL,
            CODE.RESOURCE_EXHAUSTED,  # without a RetryInfo
        ),
        Kind.REFUSED,
    ),
}


def test_grpc_codes(make: MakeTransport) -> None:
    assert set(GRPC_CODES) == set(CODE) - {CODE.OK}
    receiver = GrpcReceiver()
    t = make(receiver)
    for code, kind in GRPC_CODES.items():
        receiver.refuse = code
        answer = t.send(request())
        assert (answer.kind, answer.after_s) == (kind, 0.0), code
        assert answer.smaller is (code in (CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED))
        assert answer.reason == f"{code.name}: not now"
    receiver.stop()


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED])
def test_retry_info(make: MakeTransport, code: grpc.StatusCode) -> None:
    receiver = GrpcReceiver()
    receiver.refuse, receiver.retry_s = code, 12.25
    answer = make(receiver).send(request())
    receiver.stop()
    assert (answer.kind, answer.after_s) == (Kind.LATER, 12.25)


@pytest.mark.parametrize(
    ("text", "low_s", "high_s"),
    [
        ("17", 17, 17),
        ("0", 0, 0),
        (lambda at: format_datetime(at, usegmt=True), 50, 61),
        ("soon", 0, 0),
        ("-5", 0, 0),
        ("9" * 400, 0, float("inf")),
    ],
)
def test_retry_after(make: MakeTransport, text: Any, low_s: float, high_s: float) -> None:
    from datetime import UTC, datetime

    receiver = HttpReceiver()
    if callable(text):
        text = text(datetime.fromtimestamp(now_unix_ns() / 1e9 + 60, UTC))
    receiver.refuse, receiver.retry_s = 503, text
    answer = make(receiver).send(request())
    receiver.stop()
    assert answer.kind is Kind.LATER
    assert low_s <= answer.after_s <= high_s


@pytest.mark.parametrize("protocol", list(RECEIVERS))
@pytest.mark.parametrize("how", ["down", "silent"])
def test_nobody_there_is_later(make: MakeTransport, protocol: str, how: str) -> None:
    receiver = RECEIVERS[protocol]()
    receiver.delay_s = 1e6
    if how == "down":
        receiver.stop()
    answer = make(receiver, timeout_s=0.3).send(request())
    receiver.stop()
    assert answer.kind is Kind.LATER
    assert answer.reason


def test_grpc_is_cut_short_by_a_close(make: MakeTransport) -> None:
    receiver = GrpcReceiver()
    receiver.delay_s = 1e6
    t = make(receiver, timeout_s=60)
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(t.send(request())))
    thread.start()
    wait_until(lambda: receiver.headers)
    t.close()
    thread.join(20)
    receiver.stop()
    assert [a.kind for a in answers] == [Kind.LATER]


class RawServer:
    """Answers one HTTP request with these bytes, then closes."""

    def __init__(self, *parts: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(parts,), daemon=True)
        self._thread.start()

    def _serve(self, parts: tuple[bytes, ...]) -> None:
        sock, _ = self._listener.accept()
        with sock:
            sock.recv(65536)
            try:
                for part in parts:
                    sock.sendall(part)
            except OSError:
                return

    def stop(self) -> None:
        self._listener.close()
        self._thread.join(10)


BOMB = gzip.compress(b"\0" * (200 << 20))


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",), Kind.TAKEN),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhel",), Kind.TAKEN),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n", *[b"\0" * 65536] * 200), Kind.TAKEN),
        (
            (
                b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB),
                BOMB,
            ),
            Kind.TAKEN,
        ),
        ((b"HTTP/1.1 400 Bad\r\nContent-Type: application/x-protobuf\r\n\r\n\xff\xff",), Kind.REFUSED),
        ((b"not HTTP\r\n\r\n",), Kind.LATER),
        ((), Kind.LATER),
        ((b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 2000,), Kind.LATER),
    ],
)
def test_an_answer_is_bounded_whatever_it_is(
    make: MakeTransport, parts: tuple[bytes, ...], kind: Kind
) -> None:
    server: Any = RawServer(*parts)
    t = make(server, timeout_s=5)
    assert t.send(request()).kind is kind
    server.stop()


def test_the_message_of_a_status_is_told(make: MakeTransport) -> None:
    from google.rpc import status_pb2

    body = status_pb2.Status(message="span 3 has no name").SerializeToString()
    head = (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/x-protobuf\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    server: Any = RawServer(head + body)
    assert make(server).send(request()).reason == "HTTP status 400 Bad Request: span 3 has no name"
    server.stop()


@pytest.mark.parametrize("protocol", list(RECEIVERS))
@pytest.mark.parametrize("compression", ["gzip", "deflate", "none"])
def test_compression(make: MakeTransport, protocol: str, compression: str) -> None:
    receiver = RECEIVERS[protocol]()
    tap = Tap(receiver.port)
    t = target(receiver)._replace(endpoint=f"http://127.0.0.1:{tap.port}", compression=compression)
    if protocol != "grpc":
        t = t._replace(endpoint=f"{t.endpoint}/v1/traces")
    sender = transport.make(t)
    payload = request("n" * 1000)
    answer = sender.send(payload)
    sender.close()
    tap.close()
    assert (b"n" * 1000 in tap.seen) is (compression == "none")
    if compression == "deflate" and protocol != "grpc":
        assert receiver.headers[0]["content-encoding"] == "deflate"  # our receiver knows gzip only
    else:
        assert answer.kind is Kind.TAKEN
        assert receiver.spans()[0].name == "n" * 1000
    receiver.stop()


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca.pem) with a server (server.pem) and a client (client.pem); other.pem is of no authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("pki")
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    commands = [f"{new} -subj /CN=authority -keyout ca.key -out ca.pem"]
    for name, extra in (
        ("server", "-addext subjectAltName=IP:127.0.0.1 -CA ca.pem -CAkey ca.key"),
        ("client", "-CA ca.pem -CAkey ca.key"),
        ("other", ""),
    ):
        commands.append(f"{new} -subj /CN={name} {extra} -keyout {name}.key -out {name}.pem")
    for command in commands:
        subprocess.run(command, shell=True, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.mark.parametrize("protocol", list(RECEIVERS))
@pytest.mark.parametrize(("client", "taken"), [("client", True), ("other", False), ("", False)])
def test_mutual_tls(make: MakeTransport, pki: Path, protocol: str, client: str, taken: bool) -> None:
    receiver = RECEIVERS[protocol](0, (pki / "server.key", pki / "server.pem", pki / "ca.pem"))
    section = {"certificate": str(pki / "ca.pem"), "timeout_s": 3}
    if client:
        section |= {
            "client_certificate": str(pki / f"{client}.pem"),
            "client_key": str(pki / f"{client}.key"),
        }
    answer = make(receiver, **section).send(request())
    receiver.stop()
    assert answer.kind is (Kind.TAKEN if taken else Kind.LATER)
    assert len(receiver.spans()) == taken


def test_an_own_credential_provider(
    make: MakeTransport, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    key = "GRPC" if isinstance(receiver, GrpcReceiver) else "HTTP"
    monkeypatch.setenv(f"OTEL_PYTHON_EXPORTER_OTLP_{key}_CREDENTIAL_PROVIDER", "nobody")
    section = {"endpoint": receiver.endpoint.replace("http:", "https:")}
    with pytest.raises(RuntimeError, match="no plugin 'nobody'"):
        make(receiver, **section)
