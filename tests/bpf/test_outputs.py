"""Whatever leaves the agent: no secret of a request, no escape code of a process name."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from whyspan.recording import Reader
from whyspan_probes.registry import Found

from tests.bench.ports import free_port
from tests.bpf.child import Child
from tests.bpf.daemon import Daemon
from tests.bpf.http import Http, reading, writing
from tests.bpf.waiting import until
from tests.bpf.watcher import Watcher
from tests.unit.receivers import HttpReceiver

pytestmark = pytest.mark.bpf

CANARY = b"CANARY-4e8a11"
EVIL = "\x1b[31mevil\x07"
HOG = "\x1b[2Jhog\x9b"
REQUESTS = 17

REQUEST = (
    b"POST /v1/completions?key=%(c)s&x=%(c)s HTTP/1.1\r\nHost: %(c)s\r\nAuthorization: Bearer %(c)s\r\n"
    b"Cookie: id=%(c)s\r\nX-Secret: %(c)s\r\nX-Request-Id: id\x9b31m\r\nUser-Agent: %(c)s\r\n"
    b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n"
    b"Content-Length: 4000\r\n\r\n" % {b"c": CANARY}
)
BODY = (CANARY * 400)[:4000]
REPLY = b"HTTP/1.1 200 OK\r\nX-Reply: %s\r\nContent-Length: 4000\r\n\r\n" % CANARY


class Run(NamedTuple):
    """Everything that one run of the agent left and sent, and what its commands print, by name."""

    texts: dict[str, bytes]
    trace_ids: list[str]
    recording: Path


@pytest.fixture(scope="module")
def run(probes: dict[str, Found], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Serve requests full of secrets from a process with a bad name, beside a hog with a worse one."""
    folder = tmp_path_factory.mktemp("outputs")
    recording = folder / "recording"
    server = Child("scripted_server", EVIL, cpu=1)
    hog = Child("burn", 60, 1, HOG, cpu=1)
    watcher = Watcher([probes["sockets"]])
    receiver = HttpReceiver()
    with pytest.MonkeyPatch.context() as environment:  # enough to have everything sent
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        scraped = f"http://127.0.0.1:{(port := free_port())}/metrics"
        more = f'record = "{recording}"\n[prometheus]\nlisten = "127.0.0.1:{port}"'
        daemon = Daemon(folder, server.tgid, collector=more)
    try:
        daemon.wait_ready()
        hog.say()
        http = Http(watcher, server)
        script = [reading(len(REQUEST)), reading(len(BODY)), ["spin", 0.02], writing(REPLY), writing(BODY)]
        for _ in range(REQUESTS):
            http.talk(REQUEST + BODY, script)
        until(lambda: len(daemon.findings()) == REQUESTS, "all requests are stored", every_s=0.3)
        ids = [f["trace_id"] for f in daemon.findings()]
        commands = [
            ("slow", "--all"),
            ("slow", "--all", "--json"),
            ("explain", ids[0]),
            ("explain", ids[0], "--json"),
            ("probes", "--fields"),
            ("probes", "--json"),
            ("doctor",),
            ("doctor", "--json"),
        ]
        texts = {" ".join(c[:1] + c[2:]): daemon.output(*c).encode() for c in commands}
        with urllib.request.urlopen(scraped, timeout=20) as page:
            texts["prometheus"] = page.read()
        assert daemon.stop() == 0
        texts["otlp"] = "\n".join(receiver.strings()).encode()
        texts["replay"] = daemon.output("replay", str(recording)).encode()
        texts |= {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        yield Run(texts, ids, recording)
    finally:
        daemon.kill()
        hog.kill()
        server.kill()
        watcher.close()
        receiver.stop()


def test_the_run_is_worth_looking_at(run: Run) -> None:
    assert set(run.trace_ids) == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    assert run.texts["slow --json"].count(b"4bf92f3577b34da6a3ce929d0e0e4736") == REQUESTS
    assert b"/v1/completions" in run.texts["explain"]
    assert b"hog" in b"".join(run.texts.values())
    assert b"evil" in run.texts["slow --json"]
    assert f"{REQUESTS} findings".encode() in run.texts["replay"]
    assert run.texts["otlp"].count(b"whyspan.request\n") == REQUESTS
    assert b"/v1/completions" in run.texts["otlp"]
    assert {b"whyspan.event.count", b"whyspan.process.cpu.time"} <= set(run.texts["otlp"].split(b"\n"))
    assert b"whyspan_finding_count_total" in run.texts["prometheus"]
    assert json.loads(run.texts["probes"])["otlp"]["enabled"]
    assert {"log", "recording", "state/whyspan.db"} <= set(run.texts)
    reader = Reader(run.recording)
    heads = [h for batch in reader.batches() for h in batch.heads]
    reader.close()
    assert [h.route for h in heads] == ["/v1/completions"] * REQUESTS
    assert {h.headers["x-request-id"] for h in heads} == {"id\\x9b31m"}


def test_no_secret_leaves_the_agent(run: Run) -> None:
    assert {name for name, text in run.texts.items() if CANARY in text} == set()
    assert {name for name, text in run.texts.items() if b"CANARY" in text} == set()


def test_no_escape_code_leaves_the_agent(run: Run) -> None:
    for name, text in run.texts.items():
        if name.startswith("state/") or name == "recording":
            assert EVIL.encode() not in text or name == "recording", name
            continue
        decoded = text.decode("utf-8")
        bad = {c for c in decoded if not c.isprintable() and c not in "\n"}
        assert not bad, f"{name}: {bad}"
    assert b"\\x1b[31mevil\\x07" in run.texts["slow --json"].replace(b"\\\\", b"\\")
