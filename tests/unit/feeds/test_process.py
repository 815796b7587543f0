"""The feeds process, for real: marks arrive stamped, it holds no capability, it dies alone, it comes back."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from whyspan import config
from whyspan.discovery import Found
from whyspan.feeds import messages
from whyspan.feeds.messages import Entry, Marks, Report
from whyspan.marks import Gauges, Health, KvBlocks, Mark
from whyspan.pipeline import feeds_process
from whyspan.pipeline.feeds import Feeds
from whyspan.pipeline.feeds_process import FeedsProcess

from tests.unit.feeds.publisher import Publisher
from tests.unit.feeds.test_scrape import VLLM

WaitFor = Callable[..., None]
OWN = {os.getpid(): Found(os.getpid(), 1.0, "chat", "configuration")}


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM's server does."""

    def do_GET(self) -> None:
        body = {"/metrics": VLLM, "/health": b""}.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def engine() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    p = Publisher()
    yield p
    p.close()


class Collector:
    """Drains in a loop, as the collector does."""

    def __init__(self, *named: config.NamedFeed, **settings: Any) -> None:
        self.feeds = Feeds(config.Feeds(named=named, interval_s=1, **settings))
        self.found: dict[int, Found] = OWN
        self.marks: list[Mark] = []
        self.lost = 0

    def step(self) -> None:
        got = self.feeds.drain(self.found)
        assert [m.ts_ns for m in got] == sorted(m.ts_ns for m in got)
        assert all(m.ts_ns <= time.monotonic_ns() for m in got)
        self.marks += got
        self.lost += self.feeds.new_losses().get("feed_mark", 0)

    def until(self, condition: Callable[[], Any], each: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.feeds.states()
            each()
            self.step()
            time.sleep(0.02)

    def state(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = next(f for f in self.feeds.states()["feeds"] if f["kind"] == kind)
        return found

    def bodies(self, kind: type) -> list[Any]:
        return [m.body for m in self.marks if isinstance(m.body, kind)]


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[Callable[..., Collector]]:
    made: list[Collector] = []

    def make(*named: config.NamedFeed, **settings: Any) -> Collector:
        made.append(Collector(*named, **settings))
        return made[-1]

    yield make
    for c in made:
        c.feeds.close()


def kv(publisher: Publisher) -> config.NamedFeed:
    return config.NamedFeed(
        service="chat", kind="kv_events", endpoint=publisher.feed.endpoint, replay=publisher.feed.replay
    )


def test_marks_arrive_with_their_process(
    publisher: Publisher, engine: str, collector: Callable[..., Collector]
) -> None:
    c = collector(
        kv(publisher),
        config.NamedFeed(service="chat", kind="metrics", endpoint=f"{engine}/metrics"),
        config.NamedFeed(service="chat", kind="health", endpoint=f"{engine}/health"),
    )
    c.until(lambda: c.bodies(KvBlocks), publisher.publish)
    c.until(lambda: c.bodies(Gauges) and c.bodies(Health))
    assert {(m.tid, m.tgid) for m in c.marks} == {(0, os.getpid())}
    assert c.bodies(Gauges)[0].values["running"] == 5
    assert c.bodies(Health)[0].status == 200
    c.until(lambda: all(f["state"] == "up" for f in c.feeds.states()["feeds"]))
    states = c.feeds.states()
    assert states["rss_bytes"] > 0 and states["cpu_s"] > 0
    assert json.loads(json.dumps(states)) == states  # goes into the collector's status


def test_it_holds_no_capability_and_few_descriptors(
    publisher: Publisher, collector: Callable[..., Collector]
) -> None:
    c = collector(kv(publisher))
    c.until(lambda: c.feeds.process.rss_bytes)
    pid = c.feeds.process.tgid
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    inherited = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) < 3]
    assert inherited[0] == "/dev/null"


def test_a_killed_one_comes_back(publisher: Publisher, collector: Callable[..., Collector]) -> None:
    c = collector(kv(publisher))
    c.until(lambda: c.marks, publisher.publish)
    first = c.feeds.process.tgid
    os.kill(first, signal.SIGKILL)
    c.until(lambda: c.feeds.process.tgid not in (0, first))
    c.marks.clear()
    c.until(lambda: c.marks, publisher.publish)
    states = c.feeds.states()
    assert (states["restarts"], states["last_end"]) == (1, "killed by signal 9")


def test_a_silent_one_is_killed(
    publisher: Publisher, collector: Callable[..., Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds_process, "SILENT_S", 3.0)
    c = collector(kv(publisher))
    c.until(lambda: c.feeds.process.rss_bytes)
    first = c.feeds.process.tgid
    os.kill(first, signal.SIGSTOP)
    c.until(lambda: c.feeds.process.tgid not in (0, first))
    assert c.feeds.states()["last_end"] == "killed by signal 9"


def test_it_ends_with_the_collector(
    publisher: Publisher, collector: Callable[..., Collector], wait_for: WaitFor
) -> None:
    c = collector(kv(publisher))
    c.until(lambda: c.feeds.process.rss_bytes)
    process = psutil.Process(c.feeds.process.tgid)
    # As when the collector is killed: its end of the socket closes, and nobody says anything.
    assert c.feeds.process._link is not None
    c.feeds.process._link.close()
    assert c.feeds.process._process is not None
    assert c.feeds.process._process.wait(20) == 0
    assert not process.is_running()


def test_nothing_to_listen_to_is_no_process(collector: Callable[..., Collector]) -> None:
    c = collector()
    off = collector(kv_named("tcp://127.0.0.1:1"), enabled=False)
    for one in (c, off):
        one.step()
        assert one.feeds.process.tgid == 0
        assert one.feeds.states()["feeds"] == []


def kv_named(endpoint: str, service: str = "chat") -> config.NamedFeed:
    return config.NamedFeed(service=service, kind="kv_events", endpoint=endpoint)


def test_states_of_what_cannot_be_had(engine: str, collector: Callable[..., Collector]) -> None:
    c = collector(
        kv_named("tcp://127.0.0.1:1", "nobody"),
        kv_named("nonsense"),
        config.NamedFeed(service="chat", kind="metrics", endpoint=f"{engine}/nothing"),
        config.NamedFeed(service="chat", kind="health", endpoint="http://127.0.0.1:1/health"),
    )
    c.until(
        lambda: [f["state"] for f in c.feeds.states()["feeds"]] == ["stopped", "stopped", "absent", "down"]
    )
    first = c.feeds.states()["feeds"][0]
    assert first["problem"] == "no process of service nobody is watched"
    assert c.bodies(Health)[0].status == 0


def test_a_process_that_ends_takes_its_feeds_along(
    publisher: Publisher, collector: Callable[..., Collector]
) -> None:
    other = config.NamedFeed(service="chat", kind="health", endpoint="http://127.0.0.1:1/health")
    c = collector(kv(publisher), other)
    c.until(lambda: c.marks, publisher.publish)
    c.found = {}
    c.step()
    named, _, *ended = c.feeds.states()["feeds"]
    assert [(e["state"], e["problem"]) for e in ended] == [("ended", f"process {os.getpid()} has ended")] * 2
    assert named["problem"] == "no process of service chat is watched"
    c.marks.clear()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:  # what is still under way finds no process
        publisher.publish()
        c.step()
    assert not c.bodies(KvBlocks)


LIAR = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[2]))
for packet in {packets!r}:
    s.send(packet)
s.recv(1 << 20)
"""


def test_what_a_liar_says_is_dropped_and_counted(tmp_path: Path) -> None:
    entries = [
        messages.encode(Entry(1, 1, KvBlocks(engine="vllm", stored=1))),  # long ago: held to a minute
        messages.encode(Entry(1, 1 << 61, KvBlocks(engine="vllm", stored=2))),  # in the future: now
        messages.encode(Entry(1, 5, Health(status=200))),  # not of this kind of feed
        messages.encode(Entry(99, 5, KvBlocks(engine="vllm"))),  # of no feed
        messages.encode(Entry(1, 5, KvBlocks(engine="vllm", stored=-1))),
    ]
    packets = [
        b"garbage",
        messages.frame(Marks([msgspec.Raw(e) for e in entries], 10)),
        messages.frame(Report([], 1.0, 1)),
    ]
    process = FeedsProcess([sys.executable, "-c", LIAR.format(packets=packets)])
    feeds = Feeds(config.Feeds(named=(kv_named("tcp://127.0.0.1:1"),)), process)
    try:
        marks: list[Mark] = []
        deadline = time.monotonic() + 20
        while not process.rss_bytes:
            assert time.monotonic() < deadline
            marks += feeds.drain(OWN)
            time.sleep(0.02)
        assert [m.body.stored for m in marks if isinstance(m.body, KvBlocks)] == [1, 2]
        assert time.monotonic_ns() - 70_000_000_000 < marks[0].ts_ns < marks[1].ts_ns <= time.monotonic_ns()
        assert feeds.new_losses() == {"feed_mark": 10 + 3 + 1}
        assert feeds.new_losses() == {}
    finally:
        feeds.close()


def test_one_that_cannot_be_started(tmp_path: Path) -> None:
    process = FeedsProcess([str(tmp_path / "none")])
    feeds = Feeds(config.Feeds(named=(kv_named("tcp://127.0.0.1:1"),)), process)
    feeds.drain(OWN)
    assert "cannot be started" in feeds.states()["last_end"]
    feeds.close()


def test_feeds_are_found_on_a_process(publisher: Publisher, collector: Callable[..., Collector]) -> None:
    """A process with vLLM's command line, which listens."""
    serve = "import socket; s = socket.create_server(('127.0.0.1', 0)); print('ready', flush=True); input()"
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{publisher.port}"}
    child = subprocess.Popen(
        [sys.executable, "-c", serve, "-m vllm", "--kv-events-config", json.dumps(events)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline()
        c = collector()
        c.found = {child.pid: Found(child.pid, 1.0, "vllm", "command line")}
        c.until(lambda: c.marks, publisher.publish)
        assert [f["kind"] for f in c.feeds.states()["feeds"]] == ["metrics", "health", "kv_events"]
        assert {m.tgid for m in c.marks if isinstance(m.body, KvBlocks)} == {child.pid}
        only = collector(metrics=False, health=False)
        only.found = c.found
        only.step()
        assert [f["kind"] for f in only.feeds.states()["feeds"]] == ["kv_events"]
    finally:
        child.kill()
        child.communicate()


def test_no_network_in_the_collector() -> None:
    """What the collector imports of the feeds opens no connection."""
    names = ("zmq", "asyncio", "http.client")
    code = f"import sys, whyspan.pipeline.feeds; print([m for m in {names} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


def test_a_socketpair_holds_a_packet() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.setblocking(False)
    a.send(b"x" * messages.MAX_PACKET)
    assert len(b.recv(messages.MAX_PACKET)) == messages.MAX_PACKET
    a.close()
    b.close()


def test_feeds_that_are_turned_off_and_on_again(engine: str, collector: Callable[..., Collector]) -> None:
    named = config.NamedFeed(service="chat", kind="health", endpoint=f"{engine}/health")
    c = collector(named)
    c.until(lambda: c.bodies(Health))
    c.feeds.reconfigure(config.Feeds(enabled=False, named=(named,)))
    assert (c.feeds.states()["feeds"], c.feeds.process.tgid) == ([], 0)
    c.marks.clear()
    c.feeds.reconfigure(config.Feeds(named=(named,)))
    c.until(lambda: c.bodies(Health))
