"""The Prometheus endpoint: what it answers, to whom, and that nothing it is sent keeps it from the next."""

from __future__ import annotations

import gzip
import http.client
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Any

import pytest
from whyspan.cli.probes import _prometheus_line
from whyspan.config import Config, Prometheus
from whyspan.model import Finding
from whyspan_exporters.metrics import endpoint
from whyspan_exporters.metrics import http as exchange
from whyspan_exporters.metrics.endpoint import MAX_CONNECTIONS, Endpoint, bind
from whyspan_exporters.metrics.http import MAX_HEAD
from whyspan_exporters.metrics.scraped import PrometheusSink
from whyspan_exporters.records import Counts, Explained, Status, finding_id
from whyspan_exporters.sinks import prometheus

from tests.unit.metrics.full import COLLECTOR, OTHER_COUNTS
from tests.unit.metrics.fuzzing import requests
from tests.unit.receivers import wait_until

MakeFinding = Callable[..., Finding]
PAGE = b"whyspan_a 1\n" * 100


def page(accept: str) -> tuple[bytes, str]:
    return PAGE, "application/openmetrics-text" if "openmetrics" in accept else "text/plain"


def packed(accept: str, wanted: bool) -> tuple[bytes, str]:
    text, content_type = page(accept)
    return (exchange.pack(text) if wanted else text), content_type


@pytest.fixture
def served() -> Iterator[Endpoint]:
    e = Endpoint(bind("127.0.0.1", 0), page)
    yield e
    e.close()


def port_of(e: Endpoint) -> int:
    return int(e._listener.getsockname()[1])


def ask(port: int, method: str = "GET", path: str = "/metrics", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def status_of(data: bytes) -> int:
    match = re.match(rb"HTTP/1\.1 (\d\d\d) ", exchange.answer(data, packed))
    assert match
    return int(match[1])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics?x=y HTTP/1.1\r\n\r\n", 200),
        (b"GET http://a:1/metrics HTTP/1.1\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"y" * MAX_HEAD + b"\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET metrics\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"", 400),
    ],
)
def test_answers(request_: bytes, status: int) -> None:
    assert status_of(request_) == status


def test_pages_are_asked_for_by_accept_and_encoding(served: Endpoint) -> None:
    port = port_of(served)
    plain = ask(port)
    assert (plain.status, plain.read(), plain.headers["Content-Type"]) == (200, PAGE, "text/plain")
    assert plain.headers["Connection"] == "close"
    packed = ask(port, Accept="application/openmetrics-text", **{"Accept-Encoding": "br, gzip"})
    assert gzip.decompress(packed.read()) == PAGE
    assert packed.headers["Content-Type"] == "application/openmetrics-text"
    refused = ask(port, **{"Accept-Encoding": "gzip;q=0, identity"})
    assert refused.read() == PAGE
    head = ask(port, method="HEAD")
    assert (head.read(), head.headers["Content-Length"]) == (b"", str(len(PAGE)))
    assert (served.answered, served.refused) == (4, 0)


@pytest.mark.parametrize("data", [b"", b"GET", b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 20_000, b"\r\n\r\n"])
def test_half_a_request_and_too_much_of_one_end_the_connection(served: Endpoint, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(served)), 20) as s:
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
        got = s.recv(65536)
    assert got == b"" if not data else got.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert ask(port_of(served)).status == 200


def test_who_sends_nothing_is_told_so(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_READ_S", 0.05)
    with socket.create_connection(("127.0.0.1", port_of(served)), 20) as s:
        assert s.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_connections_are_bounded_and_the_others_served_again(served: Endpoint) -> None:
    port = port_of(served)
    idle = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(MAX_CONNECTIONS)]
    wait_until(lambda: served._open == MAX_CONNECTIONS)
    with closing(socket.create_connection(("127.0.0.1", port), 20)) as s:
        assert s.recv(1) == b""
    for s in idle:
        s.close()
    wait_until(lambda: served._open == 0)
    assert ask(port).status == 200


def test_who_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_WRITE_S", 0.05)
    e = Endpoint(bind("127.0.0.1", 0), lambda _: (b"x" * (16 << 20), "text/plain"))
    with socket.create_connection(("127.0.0.1", port_of(e)), 20) as s:
        s.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: e.answered == 1)
        wait_until(lambda: e._open == 0)
    e.close()
    assert not e._thread.is_alive()


def test_a_page_that_cannot_be_made_is_an_error_and_no_more() -> None:
    fail = threading.Event()

    def make(_: str) -> tuple[bytes, str]:
        if not fail.is_set():
            fail.set()
            raise ValueError("a defect")
        return PAGE, "text/plain"

    e = Endpoint(bind("127.0.0.1", 0), make)
    assert ask(port_of(e)).status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert ask(port_of(e)).status == 200
    e.close()


def test_mutated_requests(served: Endpoint) -> None:
    """A million of them: `python -m tests.bench.endpoint_fuzz`."""
    for data in requests(seed=7, count=3000):
        response = exchange.answer(data, packed)
        head, _, body = response.partition(b"\r\n\r\n")
        assert re.match(rb"HTTP/1\.1 (200|400|404|405|413|431) [A-Z]", head)
        length = int(re.findall(rb"\r\nContent-Length: (\d+)", head)[0])
        assert len(body) in (0, length)
    port = port_of(served)
    for data in requests(seed=8, count=200):
        with socket.create_connection(("127.0.0.1", port), 20) as s:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            while s.recv(65536):
                pass
    assert ask(port).status == 200


def test_the_sink_shows_what_it_was_given(make_finding: MakeFinding) -> None:
    sink = PrometheusSink("127.0.0.1", 0)
    finding = make_finding(1)
    explained = Explained(finding_id("i", finding), 1, finding)
    sink.emit([Status("i", COLLECTOR), Counts("i", OTHER_COUNTS), explained, explained])
    text = ask(sink.port).read().decode()
    assert 'whyspan_finding_count_total{whyspan_cause="cpu.throttled",whyspan_service="chat"} 1.0' in text
    assert "target_info{" in text
    assert sink.flush() == ""
    state = sink.status()
    assert state == {"listen": f"127.0.0.1:{sink.port}", "problem": "", "answered": 1, "refused": 0}
    sink.close()


def test_an_address_in_use_is_a_state_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sink = PrometheusSink("127.0.0.1", port)
        sink.emit([])
        assert "Address already in use" in sink.status()["problem"]
    sink._next_try_s = 0
    sink.emit([])
    assert ask(port).status == 200
    assert sink.status()["problem"] == ""
    sink.close()


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("", None),
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses(listen: str, address: Any) -> None:
    assert Prometheus(listen=listen).address == address


@pytest.mark.parametrize(
    "listen", ["9464", ":9464", "a:b", "a:65536", "::1:9464", "a:", "a:٣", "a\n:1", "[]:1"]
)
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(ValueError, match="listen"):
        Prometheus(listen=listen)


def test_it_is_off_unless_asked_for() -> None:
    assert prometheus.open(Config()) is None


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (None, "prometheus: off; set prometheus.listen to have metrics scraped"),
        ({"problem": "cannot listen on a:1: \x1b[31m"}, "prometheus: cannot listen on a:1: \\x1b[31m"),
        (
            {"listen": "127.0.0.1:9464", "problem": "", "answered": 12345, "refused": 1},
            "prometheus: http://127.0.0.1:9464/metrics; 12,345 answered, 1 refused",
        ),
    ],
)
def test_the_line_of_whyspan_probes(state: dict[str, Any] | None, line: str) -> None:
    assert _prometheus_line(state) == line
