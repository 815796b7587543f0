"""Requests to a real server around ``generate``, whose marks name nobody: whose passes they were, who waited."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import pytest
from whyspan.model import Finding

from tests.bench.ports import free_port
from tests.demo.procs import favour, spawn, stop, wait_http
from tests.engine import inproc, install
from tests.engine.watch import Watch

SERVER = Path(__file__).with_name("transformers_server.py")
CONFIG = (
    "[slo]\ne2e_ms = 1\n\n[collector]\nexplain_per_s = 1000\nexplain_core_ratio = 2\nordinary_per_s = 1000\n"
)
#: Prompt and new tokens. No two at once take nearly the same time.
ALONE = [(11, 23), (401, 7), (29, 13)]
AT_ONCE = [(601, 97), (31, 17)]
ROUNDS = 3


class Served(NamedTuple):
    """Requests by trace id: those alone, and pairs at once."""

    alone: list[str]
    pairs: list[list[str]]
    asked: dict[str, tuple[int, int]]
    findings: dict[str, Finding]
    tgid: int


class Client:
    """Numbers requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: dict[str, tuple[int, int]] = {}

    def send(self, tokens: tuple[int, int]) -> tuple[str, HTTPConnection]:
        """Send a request; its answer is to be read."""
        trace_id = f"{len(self.asked) + 1:032x}"
        self.asked[trace_id] = tokens
        body = json.dumps({"prompt_tokens": tokens[0], "max_new_tokens": tokens[1]})
        headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{'b7' * 8}-01"}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/generate", body, headers)
        return trace_id, connection

    def ask(self, *tokens: tuple[int, int]) -> list[str]:
        """Do requests at once, which arrive in order."""
        sent = [self.send(t) for t in tokens]
        for (_, connection), (_, new) in zip(sent, tokens, strict=True):
            assert json.load(connection.getresponse())["tokens"] == new
            connection.close()
        return [trace_id for trace_id, _ in sent]


def serve(folder: Path, threads: int) -> Served:
    """Requests alone, then pairs at once, at a server of so many threads under the agent."""
    port, python = free_port(), str(install.python())
    env = {**os.environ, "PYTHONPATH": str(inproc.SOURCE), "HF_HUB_OFFLINE": "1"}
    command = [python, str(SERVER), "--port", str(port), "--threads", str(threads), "--hidden", "256"]
    with (folder / "server.log").open("wb") as log:
        command = [python, "-m", "whyspan_inproc.launcher", *command]
        server = spawn(command, os.sched_getaffinity(0), env=env, stdout=log, stderr=log)
    favour(server)  # of two slow things the tests want to see one
    try:
        wait_http(f"http://127.0.0.1:{port}/health", server, 120)
        client = Client(port)
        with Watch(folder, server.pid, CONFIG) as watch:
            client.ask((5, 3))
            alone = [t for tokens in ALONE for t in client.ask(tokens)]
            pairs = [client.ask(*AT_ONCE) for _ in range(ROUNDS)]
            return Served(alone, pairs, client.asked, watch.explained(client.asked), server.pid)
    finally:
        stop(server)


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield serve(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two_threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield serve(tmp_path_factory.mktemp("two"), 2)


def phases(f: Finding) -> list[str]:
    """The names of the phases, which tile the request."""
    at = f.request.start_ns
    for p in f.phases:
        assert p.start_ns == at < p.end_ns
        at = p.end_ns
    assert at == f.request.end_ns
    return [p.name for p in f.phases]


def check(served: Served, trace_id: str) -> Finding:
    """Tokens and passes are those asked for."""
    f, (prompt, new) = served.findings[trace_id], served.asked[trace_id]
    e = f.engine
    assert e is not None
    assert (e.engine, e.core_tgid, e.state) == ("transformers", served.tgid, "ok")
    assert (e.prompt_tokens, e.cached_tokens, e.output_tokens, e.steps, e.batch) == (prompt, 0, new, new, 1)
    return f


def test_requests_one_after_the_other(one_thread: Served) -> None:
    for trace_id in one_thread.alone:
        f = check(one_thread, trace_id)
        assert phases(f) == ["frontend", "prefill", "decode", "delivery"]
        assert not {c for c in f.causes if c.startswith("engine.")}


def test_of_two_at_once_the_second_waits_for_the_first(one_thread: Served) -> None:
    for first, second in one_thread.pairs:
        one, two = check(one_thread, first), check(one_thread, second)
        assert phases(one) == ["frontend", "prefill", "decode", "delivery"]
        assert phases(two) == ["frontend", "queue", "handover", "prefill", "decode", "delivery"]
        assert not {c for c in one.causes if c.startswith("engine.")}
        assert two.verdict.cause == "engine.queueing"
        assert (two.verdict.culprit.kind, two.verdict.culprit.trace_id) == ("request", first)
        assert two.causes["engine.prefill_interference"] > 0
        # The first one's last pass ends where the queue does.
        ends = {p.name: p.end_ns for p in one.phases}, {p.name: p.end_ns for p in two.phases}
        assert ends[0]["decode"] == ends[1]["queue"]


def test_on_threads_of_their_own_nobody_waits(two_threads: Served) -> None:
    for pair in two_threads.pairs:
        found = [check(two_threads, trace_id) for trace_id in pair]
        a, b = (f.request for f in found)
        assert a.start_ns < b.end_ns
        assert b.start_ns < a.end_ns
        for f in found:
            assert phases(f) == ["frontend", "prefill", "decode", "delivery"]
            assert not {c for c in f.causes if c.startswith("engine.")}
