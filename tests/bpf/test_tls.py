"""HTTPS: the same requests as in the clear, on a loop with memory BIOs and on threads whose OpenSSL has the socket."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from whyspan.config import Target, Targets
from whyspan.discovery import Discovery
from whyspan.facts import Facts
from whyspan.model import HttpHead, Request
from whyspan.pipeline.source import LiveSource
from whyspan.requests import RequestTable
from whyspan_probes.registry import Found
from whyspan_probes.schema import Events

from tests.bpf.child import ROOT
from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until

pytestmark = pytest.mark.bpf

CONNECTIONS, REQUESTS, CHUNKS = 3, 7, 11
SECRET = "CANARY-4c3e91"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    subprocess.run(["openssl", "req", *made, *names], check=True, capture_output=True)
    return cert, key


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    client: ssl.SSLContext

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=self.client)


@pytest.fixture(params=["loop", "threads"])
def server(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Server]:
    argv = [sys.executable, "-m", "tests.bpf.tls_server", request.param, *certificate]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Server(process, port, ssl.create_default_context(cafile=certificate[0]))
    finally:
        process.kill()
        process.wait()


@dataclass
class Live:
    """What came of a live source: requests, their heads, and the handshakes."""

    source: LiveSource
    table: RequestTable
    facts: Facts = field(default_factory=Facts)
    requests: list[Request] = field(default_factory=list)
    heads: list[HttpHead] = field(default_factory=list)
    handshakes: list[Events] = field(default_factory=list)

    def take(self) -> None:
        batch = self.source.drain()
        self.facts.update(batch, self.source.schema)
        self.heads += batch.heads
        self.requests += self.table.feed(batch, self.facts)
        self.handshakes.append(self.source.schema.select(batch.events, "tls_handshake"))


@pytest.fixture
def live(server: Server, probes: dict[str, Found]) -> Iterator[Live]:
    targets = Targets(auto=False, match=(Target(pid=server.process.pid),))
    found = [probes["sockets"], probes["sched"]]
    source = LiveSource(found, Discovery(targets), ring_bytes=4 << 20, header_allow=["x-request-id"])
    yield Live(source, RequestTable(source.schema, "i"))
    source.close()


def ask(server: Server, live: Live) -> None:
    """Several connections at once, in turns."""
    clients = [server.connect() for _ in range(CONNECTIONS)]
    for n in range(REQUESTS):
        for c, client in enumerate(clients):
            headers = {
                "traceparent": f"00-{n + 1:016x}{c + 1:016x}-{1:016x}-01",
                "authorization": SECRET,
                "x-request-id": f"r{n}-{c}",
            }
            client.request("GET", f"/{CHUNKS}?key={SECRET}", headers=headers)
            response = client.getresponse()
            assert response.read() == b"abcde" * CHUNKS
    for client in clients:
        client.close()


def test_requests_and_handshakes(server: Server, live: Live) -> None:
    state = next(p.state for p in live.source.session.probes if p.probe.name == "sockets")
    hooked = {f.hook for f in state.files if f.state == "attached"}
    assert hooked == {"tls", "tls_end", "tls_handshake", "tls_handshake_end"}, state.files
    began = time.monotonic_ns()
    ask(server, live)

    def all_of_them() -> bool:
        live.take()
        return len(live.requests) == CONNECTIONS * REQUESTS

    until(all_of_them, "all requests")
    ended = time.monotonic_ns()
    assert {(r.method, r.route, r.status, r.outcome, r.response_bytes) for r in live.requests} == {
        ("GET", f"/{CHUNKS}", 200, "ok", 5 * CHUNKS)
    }
    assert {r.trace_id for r in live.requests} == {
        f"{n + 1:016x}{c + 1:016x}" for n in range(REQUESTS) for c in range(CONNECTIONS)
    }
    assert {r.request_id for r in live.requests} == {
        f"r{n}-{c}" for n in range(REQUESTS) for c in range(CONNECTIONS)
    }
    # A connection's requests share its name, the socket's own: that of what was sent on it.
    assert (
        sorted(np.unique([r.cookie for r in live.requests], return_counts=True)[1])
        == [REQUESTS] * CONNECTIONS
    )
    for r in live.requests:
        assert began < r.start_ns <= r.recv_ns <= r.head_ns <= r.first_ns <= r.end_ns < ended
        assert r.server_port == server.port
        assert r.chunks == CHUNKS
    assert SECRET not in repr(live.heads)
    shaken = np.concatenate(live.handshakes)
    assert len(shaken) == CONNECTIONS
    assert (shaken["begin_ns"] < shaken["ts_ns"]).all()
    assert set(shaken["cookie"].tolist()) == {r.cookie for r in live.requests}
    assert (shaken["lport"] == server.port).all()


def test_findings_of_https(server: Server, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, server.process.pid)
    try:
        daemon.wait_ready()
        until(lambda: "tls_end in " in daemon.log, "the library is hooked")
        client = server.connect()
        for _ in range(REQUESTS):
            client.request("GET", f"/{CHUNKS}")
            client.getresponse().read()
        client.close()
        until(lambda: len(daemon.findings()) == REQUESTS, "all requests are stored", every_s=0.3)
        for f in daemon.findings():
            assert (f["status"], f["outcome"]) == (200, "ok")
    finally:
        daemon.kill()
