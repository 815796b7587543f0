"""Failed requests of a real server under the real agent: an end, a status and a verdict for each, live and replayed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
from whyspan.model import Finding
from whyspan.pipeline.replay import Replayed, replay

from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until
from tests.demo.cgroups import CpuGroup
from tests.demo.procs import ROOT, DemoError

pytestmark = pytest.mark.bpf

ORDINARY = 61
KILLED = 6
QUOTA = 0.03
HEAD = "GET {} HTTP/1.1\r\nHost: h\r\nX-Request-Id: {}\r\n\r\n"
SIGKILLED = r"was killed by signal 9 \(SIGKILL\)"
DEAD_CHILD = r"process {child} \(\S+\) of the same service " + SIGKILLED

#: Request id to status, outcome, who ended it, cause (None: any) and what the sentence begins with.
EXPECTED: dict[str, tuple[int, str, str, str | None, str]] = {
    "s400": (400, "error", "server", "unknown", r"Failed with 400 after "),
    "s404": (404, "error", "server", "unknown", r"Failed with 404 after "),
    "s429": (429, "error", "server", "unknown", r"Failed with 429 after "),
    "s503": (503, "error", "server", "unknown", r"Failed with 503 after "),
    "left-stream": (
        200,
        "reset",
        "client_close",
        None,
        r"The client (closed|reset) the connection after \d+ ms and \d+ chunks",
    ),
    "reset-stream": (
        200,
        "reset",
        "client_reset",
        None,
        r"The client reset the connection after \d+ ms and \d+ chunks",
    ),
    "gave-up": (
        0,
        "reset",
        "client_close",
        "unknown",
        r"The client closed the connection after \d+ ms, before any answer",
    ),
    "half": (
        0,
        "reset",
        "client_close",
        None,
        r"The client closed the connection after \d+ ms, before the request's head was whole",
    ),
    "pending-1": (0, "reset", "client_reset", None, r"The client reset the connection after "),
    "pending-2": (0, "reset", "client_reset", None, r"The client reset the connection after "),
    "blocked": (
        0,
        "reset",
        "client_close",
        "python.loop_blocked",
        r"The client closed the connection after \d+ ms, before any answer; the server took \d+ ms to notice\. "
        r"No byte of an answer in \d+ ms",
    ),
    "throttled": (
        0,
        "reset",
        "client_close",
        "cpu.throttled",
        r"The client closed the connection after \d+ ms, before any answer",
    ),
    "child-500": (
        500,
        "error",
        "server",
        None,
        r"Failed with 500 after \d+ ms; \d+ ms after its start " + DEAD_CHILD,
    ),
    "child-hangs": (
        0,
        "reset",
        "client_close",
        None,
        # A busy machine takes some ms to read the end of the connection; the sentence then says so.
        r"The client closed the connection after \d+ ms, before any answer(; the server took \d+ ms to notice)?; "
        r"\d+ ms after its start " + DEAD_CHILD,
    ),
    "exited": (
        0,
        "killed",
        "process_exit",
        None,
        r"Process {other} \(\S+\) ended with status 3 after \d+ ms, before",
    ),
    "exits": (0, "killed", "process_exit", None, r"Process {other} \(\S+\) ended with status 3 after "),
    "killed-stream": (
        200,
        "killed",
        "process_exit",
        None,
        r"Process {server} \(\S+\) " + SIGKILLED + r" after \d+ ms and \d+ chunks",
    ),
    "killed-waiting": (
        0,
        "killed",
        "process_exit",
        None,
        r"Process {server} \(\S+\) " + SIGKILLED + r" after \d+ ms, before any answer",
    ),
}


class Server:
    """One failing server."""

    def __init__(self, group: CpuGroup) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bpf.failing_server"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            preexec_fn=group.join,  # noqa: PLW1509
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.port, self.child = said["port"], said["child"]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def ask(self, path: str, name: str) -> socket.socket:
        """Connect and send a request."""
        s = self.connect()
        s.sendall(HEAD.format(path, name).encode())
        return s

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Run(NamedTuple):
    """What a run left: findings by request id, those without one, the replay, and the processes' numbers."""

    found: dict[str, Finding]
    unnamed: list[Finding]
    replayed: Replayed
    live: list[Finding]
    numbers: dict[str, int]
    daemon: Daemon


def read_until(s: socket.socket, text: bytes) -> None:
    """Read until these bytes have come."""
    got = b""
    while text not in got:
        data = s.recv(65536)
        assert data, got
        got += data


def reset(s: socket.socket) -> None:
    """Close by a reset."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    s.close()


def clients_fail(server: Server, group: CpuGroup) -> None:
    """Clients that leave, give up and reset; statuses; a child that dies."""
    with server.connect() as s:
        for i in range(ORDINARY):
            s.sendall(HEAD.format("/status/200", f"ok-{i}").encode())
            read_until(s, b"ok")
        for status in (400, 404, 429, 503):
            s.sendall(HEAD.format(f"/status/{status}", f"s{status}").encode())
            read_until(s, b"ok")
    left = server.ask("/stream/500", "left-stream")
    read_until(left, b"data: 9\n")
    left.shutdown(socket.SHUT_WR)  # its FIN goes first, whatever it has not read
    left.close()
    with_reset = server.ask("/stream/500", "reset-stream")
    read_until(with_reset, b"data: 9\n")
    reset(with_reset)
    waiting = server.ask("/hang", "gave-up")
    time.sleep(0.4)
    waiting.close()
    with server.connect() as s:
        s.sendall(b"POST /half?key=1 HTTP/1.1\r\nX-Request-Id: half\r\nX-Cut: o")
        time.sleep(0.2)
    s = server.ask("/hang", "pending-1")
    s.sendall(HEAD.format("/status/200", "pending-2").encode())
    time.sleep(0.2)
    reset(s)
    s = server.ask("/block/700", "blocked")
    time.sleep(0.2)
    s.close()
    with server.ask("/status/200", "ok-after") as s:
        read_until(s, b"\r\n\r\nok")  # the loop runs again
    group.set_quota(QUOTA)
    s = server.ask("/work/3000", "throttled")
    time.sleep(2.5)
    s.close()
    group.set_quota(None)
    time.sleep(0.5)
    answered, hung = server.ask("/child", "child-500"), server.ask("/child/hang", "child-hangs")
    time.sleep(0.2)
    os.kill(server.child, signal.SIGKILL)
    read_until(answered, b"\r\n\r\nok")
    answered.close()
    time.sleep(0.2)
    hung.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Fail in every way under the agent, which records, and replay what it recorded."""
    folder = tmp_path_factory.mktemp("failures")
    try:
        group = CpuGroup("bpf-failures")
    except (DemoError, OSError) as e:
        pytest.skip(f"no usable CPU cgroup: {e}")
    server, other = Server(group), Server(group)
    recording = folder / "recording"
    tgids = server.process.pid, other.process.pid
    daemon = Daemon(folder, *tgids, collector=f'record = "{recording}"', slo="")
    try:
        daemon.wait_ready()
        clients_fail(server, group)
        waits = other.ask("/hang", "exited")
        time.sleep(0.3)
        other.ask("/exit/3", "exits").close()
        assert other.process.wait(20) == 3
        waits.close()
        # The loop is blocked: what comes now is not read before the server is killed.
        stream, waits = server.ask("/stream/1000", "killed-stream"), server.ask("/hang", "killed-waiting")
        read_until(stream, b"data: 9\n")
        block = server.ask("/block/20000", "killed-blocked")
        time.sleep(0.3)
        unread = server.ask("/status/200", "nobody-read-this")
        time.sleep(0.3)
        server.kill()
        assert server.process.returncode == -signal.SIGKILL
        for s in (stream, waits, block, unread):
            s.close()
        until(
            lambda: len([f for f in daemon.findings() if f["outcome"] == "killed"]) == KILLED,
            "all failures are stored",
            every_s=0.3,
        )
        texts = daemon.output("slow", "--failed", "--limit", "100")
        assert daemon.stop() == 0
        assert "killed" in texts
        with sqlite3.connect(folder / "state" / "whyspan.db") as db:
            live = [
                msgspec.msgpack.decode(r[0], type=Finding) for r in db.execute("SELECT finding FROM findings")
            ]
        yield Run(
            {f.request.request_id: f for f in live if f.request.request_id},
            [f for f in live if not f.request.request_id],
            replay(recording),
            live,
            {"server": server.process.pid, "child": server.child, "other": other.process.pid},
            daemon,
        )
    finally:
        daemon.kill()
        server.kill()
        other.kill()
        group.remove()


@pytest.mark.parametrize("name", EXPECTED)
def test_each_failure_has_an_end_a_status_and_a_verdict(run: Run, name: str) -> None:
    status, outcome, ended_by, cause, sentence = EXPECTED[name]
    assert name in run.found, sorted(run.found)
    f = run.found[name]
    assert (f.request.status, f.request.outcome, f.request.ended_by) == (status, outcome, ended_by)
    if cause is not None:
        assert f.verdict.cause == cause, f.verdict
    for key, number in run.numbers.items():
        sentence = sentence.replace("{" + key + "}", str(number))
    assert re.match(sentence, f.verdict.sentence), f.verdict.sentence
    assert f.ruled_out
    at = f.request.start_ns
    for s in f.segments:
        assert (s.start_ns, s.end_ns > s.start_ns) == (at, True)
        at = s.end_ns
    assert at == f.request.end_ns


def test_the_request_that_nobody_read_ended_with_its_process(run: Run) -> None:
    (f,) = [f for f in run.unnamed if f.request.head == "unread"]
    assert (f.request.tgid, f.request.outcome, f.request.exit_code) == (run.numbers["server"], "killed", 9)
    assert 200e6 < f.wall_ns < 20e9
    assert "before anybody had read the request" in f.verdict.sentence


def test_the_quota_is_named_for_the_request_that_its_client_gave_up(run: Run) -> None:
    f = run.found["throttled"]
    assert f.verdict.culprit.kind == "cgroup"
    assert f.verdict.culprit.name.endswith("/bpf-failures")
    assert f.causes["cpu.throttled"] > 0.5 * f.wall_ns / 1e6
    # The two threads pass the GIL to and fro: the quota ends in either.
    assert any(s.thread in ("python", "burner") and s.state == "throttled" for s in f.segments)


def test_a_failure_is_not_taken_for_usual(run: Run) -> None:
    ordinary = [f for f in run.live if f.request.outcome == "ok" and f.request.request_id.startswith("ok-")]
    assert len(ordinary) >= ORDINARY
    for name in ("s429", "s503"):
        f = run.found[name]
        assert 50 <= f.baseline_count <= len(ordinary)
        assert "usual" in f.verdict.sentence


def test_replayed_it_is_the_same(run: Run) -> None:
    assert run.replayed.torn == ""

    def key(f: Finding) -> tuple[int, int, str]:
        return f.request.cookie, f.request.seq, f.request.outcome

    again = {key(f): f for f in run.replayed.findings}
    assert {key(f) for f in run.live} == set(again)
    for f in run.live:
        assert f == again[key(f)]
