"""``whyspan serve`` as a process: sockets, TLS, refusals, bounds, news, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from whyspan_exporters.records import Status
from whyspan_exporters.store import Store

from tests.page.served import Served, serve
from tests.unit import viewlab

TOKEN = "0123456789abcdef-test"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that only these tests use."""
    return viewlab.build(tmp_path_factory.mktemp("serve") / "s.db", 20, hours=0.05).path


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[Served]:
    """A server for tests that only ask."""
    with serve(store) as found:
        yield found


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def ask(
    connection: http.client.HTTPConnection, path: str = "/api/health", **headers: str
) -> tuple[int, bytes]:
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def at(served: Served) -> tuple[str, int]:
    parts = urlsplit(served.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def refused(*options: str) -> str:
    """Return what it says when it does not start; its status is that of a wrong configuration or of an error."""
    argv = [sys.executable, "-c", "from whyspan.cli import main; main()", "serve", *options]
    env = os.environ | {"WHYSPAN_CONFIG": "", "WHYSPAN_OVERRIDES": ""}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode in (1, 2) and not done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_unix_socket(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with serve(store, "--socket", str(path), "--socket-mode", "0660") as s:
        assert s.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert ask(_Unix(path)) == (200, b'{"collector":true}')
        assert ask(_Unix(path), Host="evil.example")[0] == 421
        assert "cannot listen" in refused("--store", str(store), "--socket", str(path))  # it is in use
        assert ask(_Unix(path))[0] == 200
        s.process.kill()
        s.process.wait()
    with serve(store, "--socket", str(path)):  # the file that it left is no hindrance
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    path.write_text("a file of somebody's")
    assert "cannot listen" in refused("--store", str(store), "--socket", str(path))
    assert path.read_text() == "a file of somebody's"


def test_refusals_are_one_line(store: Path, token_file: Path, tmp_path: Path) -> None:
    on = ("--store", str(store))
    assert "other hosts can reach 0.0.0.0" in refused(*on, "--listen", "0.0.0.0:0")
    assert "needs TLS" in refused(*on, "--listen", "0.0.0.0:0", "--token-file", str(token_file))
    assert "prefix" in refused(*on, "--prefix", "why")
    assert "listen" in refused(*on, "--listen", "nowhere")
    (tmp_path / "no.pem").write_text("no certificate")
    tls = ("--tls-certificate", str(tmp_path / "no.pem"), "--tls-key", str(tmp_path / "no.pem"))
    assert "tls_certificate" in refused(*on, *tls)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on 127.0.0.1 port {taken.getsockname()[1]}: Address" in refused(
            *on, "--listen", where
        )


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain, key


def test_public_with_tls_and_token(store: Path, token_file: Path, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    options = ("--tls-certificate", str(chain), "--tls-key", str(key), "--token-file", str(token_file))
    with serve(store, "--listen", "0.0.0.0:0", *options) as s:
        assert s.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(chain))

        def https() -> http.client.HTTPConnection:
            return http.client.HTTPSConnection("localhost", at(s)[1], context=context, timeout=20)

        assert ask(https())[0] == 401
        assert ask(https(), Authorization=f"Bearer {TOKEN}")[0] == 200
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            ask(http.client.HTTPConnection(*at(s), timeout=20))


def test_it_keeps_no_capability(store: Path) -> None:
    with serve(store) as s:
        status = Path(f"/proc/{s.process.pid}/status").read_text()
        found = dict(
            line.split(":\t", 1) for line in status.splitlines() if line.startswith(("Cap", "NoNew"))
        )
        assert {found[name].strip() for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
        assert found["NoNewPrivs"] == "1"


def test_it_does_not_change_the_store(store: Path) -> None:
    before = store.read_bytes()
    with serve(store) as s:
        for path in (
            "/api/requests?limit=10000",
            "/api/facets",
            "/api/tail?since=1h",
            "/api/host",
            "/api/health",
        ):
            assert ask(http.client.HTTPConnection(*at(s), timeout=20), path)[0] == 200
    assert store.read_bytes() == before


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"\r\n" * 1000,
    ],
)
def test_heads_that_are_none(running: Served, head: bytes) -> None:
    with socket.create_connection(at(running), timeout=20) as s:
        with contextlib.suppress(ConnectionError):  # it may hang up before all of it has arrived
            s.sendall(head)
            s.shutdown(socket.SHUT_WR)
        first = b""
        with contextlib.suppress(ConnectionError):
            first = s.recv(100)
    assert not first or first.startswith((b"HTTP/1.1 4",)), first
    assert ask(http.client.HTTPConnection(*at(running), timeout=20))[0] == 200


def test_who_sends_no_head_is_not_waited_for(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same with less patience.
    code = "from whyspan.page import server; server.HEAD_S = 0.5; from whyspan.cli import main; main()"
    monkeypatch.setattr("tests.page.served.COMMAND", (sys.executable, "-c", code, "serve"))
    with serve(store) as s, news(s) as stream, changing(store) as change:
        for part in (b"", b"GET / HT", b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT"):
            with socket.create_connection(at(s), timeout=20) as c:
                c.sendall(part)
                while c.recv(65536):  # ends when the server does, not at the timeout
                    pass
        # Who listens is not cut off, though that takes longer.
        change(Status("viewlab", {}))
        assert read_event(stream).startswith(b"data:")


@contextlib.contextmanager
def news(served: Served) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(*at(served), timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/api/live")
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        # Both lines come when it watches the store: what changes from now on is news.
        assert (response.readline(), response.readline()) == (b"retry: 3000\n", b": listening\n")
        yield response


def read_event(stream: http.client.HTTPResponse) -> bytes:
    while True:
        line = stream.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data:"):
            return line


@contextlib.contextmanager
def changing(store: Path) -> Iterator[Callable[..., None]]:
    """Yield a function that writes to the store as the exporter does."""
    sink = Store(store, max_age_ns=10**18, max_bytes=1 << 30, now=time.time_ns)

    def change(*records: Any) -> None:
        sink.emit(records)
        assert not sink.flush()

    yield change
    sink.close()


def test_news(store: Path) -> None:
    with serve(store) as s, news(s) as one, news(s) as two, changing(store) as change:
        change(Status("viewlab", {"n": 1}))
        assert read_event(one) == read_event(two) == b"data: status\n"
        change(viewlab.explained(viewlab.finding(777, random.Random(1)), time.time_ns()))
        assert read_event(one) == read_event(two) == b"data: requests\n"


def test_it_ends_at_once_and_well_though_somebody_listens(store: Path) -> None:
    with serve(store) as s, news(s) as stream:
        s.process.send_signal(signal.SIGINT)
        while stream.readline():
            pass
        assert s.process.wait(20) == 0
        assert s.log.read_text() == ""


def test_a_store_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with serve(path) as s:
        status, body = ask(http.client.HTTPConnection(*at(s), timeout=20), "/api/requests")
        assert (status, b"there is no store" in body) == (503, True)
        assert "there is no store there yet" in s.log.read_text()
        viewlab.build(path, 3, hours=0.01)
        assert ask(http.client.HTTPConnection(*at(s), timeout=20), "/api/requests")[0] == 200


def test_a_store_that_may_not_be_read(tmp_path: Path) -> None:
    """Of root's capabilities none is left to read it with."""
    folder = tmp_path / "in"
    folder.mkdir()
    made = viewlab.build(folder / "s.db", 2, hours=0.01)
    on = ("--store", str(made.path), "--listen", "127.0.0.1:0")
    made.path.chmod(0)
    assert "s.db: permission denied: it is of user" in refused(*on)
    folder.chmod(0)
    try:
        assert "s.db: Permission denied (its folder)" in refused(*on)
    finally:
        folder.chmod(0o700)
