"""A recording of a live run comes to the verdicts that the run came to."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from whyspan.model import Finding
from whyspan.pipeline.replay import Replayed, replay
from whyspan_probes.registry import Found

from tests.bpf.child import Child
from tests.bpf.daemon import Daemon
from tests.bpf.http import Http, reading, writing
from tests.bpf.waiting import until
from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf

REQUESTS = 29
SPINS_S = (0.0, 0.002, 0.07)  # the last is long enough to be a cause
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Request-Id: r-%d\r\nContent-Length: 0\r\n\r\n"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture(scope="module")
def run(
    probes: dict[str, Found], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[Finding], Replayed]]:
    """Serve requests under the agent, which records, and replay what it recorded."""
    folder: Path = tmp_path_factory.mktemp("live")
    recording = folder / "recording"
    server = Child("scripted_server", "server", cpu=1)
    watcher = Watcher([probes["sockets"]])
    daemon = Daemon(folder, server.tgid, collector=f'record = "{recording}"')
    try:
        daemon.wait_ready()
        http = Http(watcher, server)
        for i in range(REQUESTS):
            text = REQUEST % i
            http.talk(text, [reading(len(text)), ["spin", SPINS_S[i % len(SPINS_S)]], writing(REPLY)])
        until(lambda: len(daemon.findings()) == REQUESTS, "all requests are stored", every_s=0.3)
        assert daemon.stop() == 0
        with sqlite3.connect(folder / "state" / "whyspan.db") as db:
            rows = db.execute("SELECT finding FROM findings").fetchall()
        yield [msgspec.msgpack.decode(r[0], type=Finding) for r in rows], replay(recording)
    finally:
        daemon.kill()
        server.kill()
        watcher.close()


def test_the_same_findings_to_the_last_field(run: tuple[list[Finding], Replayed]) -> None:
    live, replayed = run
    assert replayed.torn == ""
    assert len(live) == REQUESTS
    again = {f.request.request_id: f for f in replayed.findings}
    assert {f.request.request_id for f in live} == set(again)
    for finding in live:
        assert finding == again[finding.request.request_id]


def test_every_live_finding_tiles(run: tuple[list[Finding], Replayed]) -> None:
    for finding in run[0]:
        at = finding.request.start_ns
        for s in finding.segments:
            assert (s.start_ns, s.end_ns > s.start_ns) == (at, True)
            at = s.end_ns
        assert at == finding.request.end_ns
        assert sum(s.end_ns - s.start_ns for s in finding.segments) == finding.wall_ns
