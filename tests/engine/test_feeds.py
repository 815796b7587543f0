"""The feeds of a real vLLM: every block of every prompt, a gap and its repair, /metrics and health, and its death."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import pytest
from whyspan import config
from whyspan.discovery import Found
from whyspan.marks import Gauges, Health, KvBlocks, Mark
from whyspan.pipeline.feeds import Feeds
from whyspan.recording import Reader as Recording
from whyspan_exporters.reader import Reader

from tests.bench.ports import free_port
from tests.engine import vllm
from tests.engine.conftest import OTHER_CPU, Started
from tests.engine.watch import Watch
from tests.unit.receivers import GrpcReceiver

BLOCK = 32
OUTPUT = 4  # tokens; with a prompt of 5 over whole blocks they fill none
#: Blocks of the prompts: before the cut, while it lasts, and after it.
BEFORE, CUT, AFTER = (3, 1, 7, 11, 2, 5, 13), (2, 3, 5, 7, 1), (2,)
STARTED_WITH = 8  # prompt tokens of the completion that `wait_ready` does


class Prompts:
    """Prompts that share no block, and what they sum up to."""

    def __init__(self, server: vllm.Server) -> None:
        self._server = server
        self._numbers = itertools.count()
        self.sent: list[list[int]] = []

    def send(self, blocks: int) -> None:
        """Complete a new prompt of so many whole blocks and 5 tokens."""
        n = next(self._numbers)
        # The first token and the step tell prompts apart; 1021 is prime, so that the tokens of a block differ.
        prompt = [2 + (37 * n + 1 + (n + 3) * i) % 1021 for i in range(BLOCK * blocks + 5)]
        body = {"model": vllm.NAME, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._server.url}/v1/completions",
            json.dumps(body | {"return_token_ids": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert len(json.load(answer)["choices"][0]["token_ids"]) == OUTPUT
        self.sent.append(prompt)

    @property
    def blocks(self) -> int:
        """Whole blocks of all prompts so far."""
        return sum(len(p) // BLOCK for p in self.sent)


class Proxy:
    """Passes bytes on between one port and another, until it is cut."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._pairs: list[socket.socket] = []
        self._cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections and take no new ones."""
        self._cut = True
        for s in self._pairs:
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Pass on again."""
        self._cut = False

    def close(self) -> None:
        """End it."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self._cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._pairs += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
        for s in (a, b):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)


class Listener:
    """The collector's side, behind the proxy."""

    def __init__(self, pid: int, endpoint: str, replay: str) -> None:
        named = config.NamedFeed(service="vllm", kind="kv_events", endpoint=endpoint, replay=replay)
        self.feeds = Feeds(config.Feeds(kv_events=False, metrics=False, health=False, named=(named,)))
        self.found = {pid: Found(pid, 1.0, "vllm", "command line")}
        self.marks: list[Mark] = []

    def until(self, condition: Callable[[], Any], each: Callable[[], None] = lambda: None) -> None:
        """Drain until *condition* holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (self.feeds.states(), self.stored)
            each()
            self.marks += self.feeds.drain(self.found)
            time.sleep(0.05)

    @property
    def stored(self) -> int:
        """Blocks stored, of all marks."""
        return sum(m.body.stored for m in self.marks if isinstance(m.body, KvBlocks))

    @property
    def state(self) -> dict[str, Any]:
        """How the feed is."""
        for found in self.feeds.states()["feeds"]:
            return dict(found)
        return {"state": "none yet"}


class Run(NamedTuple):
    """What was sent, heard and said."""

    prompts: Prompts
    server: int
    listener: Listener
    warm: int  # blocks sent until the first was heard
    before: int  # blocks heard before the cut, and in all
    heard: int
    repaired: dict[str, Any]  # the feed's state after the repair
    down: dict[str, Any]  # and after the engine was killed
    marks: list[Mark]  # the agent's recording
    status: dict[str, Any]  # the agent's, before the engine was killed
    ended: list[dict[str, Any]]  # the feeds' states, after it
    log: str


def feeds_of(watch: Watch) -> dict[str, Any]:
    """Return what the agent last said of its feeds."""
    reader = Reader(watch.state / "whyspan.db")
    try:
        found: dict[str, Any] = reader.status().get("feeds", {})
        return found
    finally:
        reader.close()


def states(watch: Watch) -> dict[str, str]:
    """Return their states by kind."""
    return {f["kind"]: f["state"] for f in feeds_of(watch).get("feeds", ())}


@pytest.fixture(scope="module")
def run(receiver: GrpcReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A server of its own, which does not survive this; the agent beside it, and a listener whose line is cut."""
    folder = tmp_path_factory.mktemp("feeds")
    ports = free_port(), free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    recording = folder / "run.whyspan"
    more = f'[feeds]\ninterval_s = 1\n[collector]\nrecord = "{recording}"\n'
    proxies = [Proxy(port) for port in ports]
    with (
        Started(folder, receiver, "--kv-events-config", json.dumps(events)) as server,
        Watch(folder, server.pid, more, {OTHER_CPU}) as watch,
    ):
        listener = Listener(server.pid, *(f"tcp://127.0.0.1:{p.port}" for p in proxies))
        try:
            up = {"kv_events": "up", "metrics": "up", "health": "up"}
            watch.wait(lambda: states(watch) == up, 60, "listening")
            prompts = Prompts(server)
            listener.until(lambda: listener.state["state"] == "up")
            listener.until(lambda: listener.stored, lambda: prompts.send(1))
            warm = prompts.blocks
            for blocks in BEFORE:
                prompts.send(blocks)
            listener.until(lambda: listener.stored >= sum(BEFORE) + 1)
            before = listener.stored
            proxies[0].cut()
            listener.until(lambda: listener.state["state"] == "down")
            for blocks in CUT:
                prompts.send(blocks)
            proxies[0].mend()
            listener.until(lambda: listener.state["state"] == "up")
            for blocks in AFTER:
                prompts.send(blocks)
            listener.until(lambda: listener.stored >= before + sum(CUT + AFTER))
            # One more shows that nothing comes twice.
            prompts.send(1)
            listener.until(lambda: listener.stored >= before + sum(CUT + AFTER) + 1)
            listener.until(lambda: listener.state["repaired"])
            heard, repaired = listener.stored, listener.state
            time.sleep(3)  # a look at /metrics, and a status
            status = feeds_of(watch)
            pids = server.pids()
            os.kill(server.engine_core, signal.SIGKILL)
            listener.until(lambda: listener.state["state"] == "down")
            down = listener.state
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            server.process.wait()
            watch.wait(lambda: set(states(watch).values()) == {"ended"}, 30, "aware of the end")
            ended = feeds_of(watch)["feeds"]
        finally:
            listener.feeds.close()
            for p in proxies:
                p.close()
    reader = Recording(recording)
    try:
        marks = [m for batch in reader.batches() for m in batch.marks]
    finally:
        reader.close()
    yield Run(
        prompts,
        server.pid,
        listener,
        warm,
        before,
        heard,
        repaired,
        down,
        marks,
        status,
        ended,
        watch.log.read_text(),
    )


def test_every_block_of_every_prompt_is_heard_once(run: Run) -> None:
    assert sum(BEFORE) + 1 <= run.before <= sum(BEFORE) + run.warm
    assert run.heard == run.before + sum(CUT + AFTER) + 1
    marks = [m.body for m in run.listener.marks if isinstance(m.body, KvBlocks)]
    assert {b.block_size for b in marks if b.stored} == {BLOCK}
    assert sum(b.stored_tokens for b in marks) == run.heard * BLOCK
    hashes = [h for b in marks for h in b.hashes]
    assert len(hashes) == len(set(hashes)) == run.heard


def test_the_gap_was_repaired_by_replay(run: Run) -> None:
    assert (run.repaired["gaps"], run.repaired["missed"]) == (1, 0)
    assert run.repaired["repaired"] >= len(CUT)
    marks = [m.body for m in run.listener.marks if isinstance(m.body, KvBlocks)]
    assert sum(b.stored for b in marks if b.replayed) >= sum(CUT)
    assert all(b.gap == 0 for b in marks)


def test_the_agent_found_and_recorded_it_all_by_itself(run: Run) -> None:
    blocks = [m for m in run.marks if isinstance(m.body, KvBlocks)]
    assert {m.tgid for m in blocks} == {run.server}
    assert sum(m.body.stored for m in blocks if isinstance(m.body, KvBlocks)) == run.prompts.blocks
    kinds = {f["kind"]: f for f in run.status["feeds"]}
    assert all(f["errors"] == 0 for f in kinds.values()), kinds
    assert kinds["kv_events"]["replay"]
    times = [m.ts_ns for m in blocks]
    assert times == sorted(times)


def test_metrics_and_health(run: Run) -> None:
    gauges = [m.body for m in run.marks if isinstance(m.body, Gauges)]
    last = gauges[-1].values
    assert last["prompt_tokens"] == sum(map(len, run.prompts.sent)) + STARTED_WITH
    assert last["generation_tokens"] == OUTPUT * (len(run.prompts.sent) + 1)
    assert last["preemptions"] == last["prefix_hits"] == 0
    assert 0 <= last["kv_usage"] <= 1
    assert {"running", "waiting", "waiting_capacity", "waiting_deferred", "prefix_queries"} <= last.keys()
    health = [m.body for m in run.marks if isinstance(m.body, Health)]
    assert health[0].status == 200


def test_no_token_leaves(run: Run) -> None:
    out = msgspec.msgpack.encode([run.marks, run.listener.marks])
    for prompt in run.prompts.sent:
        for at in range(0, len(prompt) - 8, 8):
            # Eight in a row, as they are on the wire.
            row = b"".join(msgspec.msgpack.encode(t) for t in prompt[at : at + 8])
            assert row not in out


def test_the_death_of_the_engine_is_a_state(run: Run) -> None:
    assert run.down["state"] == "down"
    assert run.down["last_error"] == "the engine closed the connection"
    assert {f["problem"] for f in run.ended} == {f"process {run.server} has ended"}
    assert "Traceback" not in run.log
    assert run.status["restarts"] == 0


def test_the_cost_is_told(run: Run) -> None:
    assert run.status["rss_bytes"] > 0
    assert run.status["cpu_s"] > 0
