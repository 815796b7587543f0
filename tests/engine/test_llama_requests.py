"""Requests to a real llama.cpp server, whose steps name nobody: whose they were, and who waited for whom."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from whyspan.model import Finding

from tests.bench.ports import free_port
from tests.bpf.waiting import until
from tests.conftest import required_tiers
from tests.demo.procs import favour
from tests.engine import llama, llama_install
from tests.engine.watch import Watch

CONFIG = (
    "[slo]\ne2e_ms = 1\n\n[collector]\nexplain_per_s = 1000\nexplain_core_ratio = 2\nordinary_per_s = 1000\n"
)
PAIRS, STREAMED = 5, 40
#: Tokens that all prompts begin with, from the cache but for the first request: see test_llama.
SHARED = 4


@pytest.fixture(scope="module", autouse=True)
def needs_llama() -> None:
    """Skip, or fail when it is required, without llama.cpp."""
    if not llama_install.installed():
        reason = "llama.cpp is not installed: `python -m tests.engine.llama_install` does it"
        if "engine" in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


class Asked(NamedTuple):
    """A request, and what its client saw."""

    trace_id: str
    begin_ns: int
    end_ns: int
    first_ns: int
    prompt_tokens: int
    completion_tokens: int


class Served(NamedTuple):
    """Requests one after the other, pairs at once (who came first, who waited), and one that is streamed."""

    alone: list[Asked]
    behind_prompt: list[tuple[Asked, Asked]]
    behind_tokens: list[tuple[Asked, Asked]]
    streamed: Asked
    truth: list[llama.Truth]
    findings: dict[str, Finding]
    tgid: int

    def of(self, asked: Asked) -> Finding:
        return self.findings[asked.trace_id]

    def steps(self, asked: Asked, since_ns: int = 0) -> list[llama.Truth]:
        """The calls made for a request: of those in its time the ones since another was answered."""
        since_ns = max(since_ns, asked.begin_ns)
        return [
            t
            for t in self.truth
            if t.call == "llama_decode" and since_ns < t.begin_ns and t.end_ns < asked.end_ns
        ]


def ask(port: int, trace_id: str, prompt: str, tokens: int, stream: bool = False) -> Asked:
    """Do one completion; 2 would end it."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "logit_bias": {"2": -100}}
    headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{'b7' * 8}-01"}
    data = json.dumps(body | {"stream": True} if stream else body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
    begin_ns, first_ns, chunks = time.monotonic_ns(), 0, 0
    with urllib.request.urlopen(request, timeout=60) as answer:
        if not stream:
            usage = json.loads(answer.read())["usage"]
            end_ns = time.monotonic_ns()
            return Asked(
                trace_id, begin_ns, end_ns, end_ns, usage["prompt_tokens"], usage["completion_tokens"]
            )
        for line in answer:
            if line.startswith(b"data: {"):
                first_ns = first_ns or time.monotonic_ns()
                chunks += 1
    return Asked(trace_id, begin_ns, time.monotonic_ns(), first_ns, 0, chunks)


class Client:
    """Numbers requests, and has two at once."""

    def __init__(self, server: llama.Server, pool: ThreadPoolExecutor) -> None:
        self.server, self.pool, self.asked = server, pool, 0

    def ask(self, length: int, tokens: int, stream: bool = False) -> Asked:
        self.asked += 1
        prompt = chr(ord("A") + self.asked % 26) + "x" * (length + self.asked)  # begins like no other of late
        return ask(self.server.port, f"{self.asked:032x}", prompt, tokens, stream)

    def pair(self, first: tuple[int, int], second: tuple[int, int]) -> tuple[Asked, Asked]:
        """The second comes once the server computes for the first."""
        calls = len(self.server.truth())
        one = self.pool.submit(self.ask, *first)
        until(lambda: one.done() or len(self.server.truth()) > calls + 3, "steps of the first", every_s=0.002)
        assert not one.done()
        two = self.ask(*second)
        return one.result(), two


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("llama")
    server = llama.Server(folder, free_port())
    favour(server.process)  # of two slow things the tests want to see one
    try:
        with Watch(folder, server.tgid, CONFIG) as watch, ThreadPoolExecutor(2) as pool:
            client = Client(server, pool)
            client.ask(10, 2)  # the very first has nothing cached
            already = len(server.truth())
            alone = [client.ask(30 + 170 * n, 11 + 2 * n) for n in range(PAIRS)]
            behind_prompt = [client.pair((1500, 3), (20, 5)) for _ in range(PAIRS)]
            behind_tokens = [client.pair((7, 190), (20, 5)) for _ in range(PAIRS)]
            streamed = client.ask(300, STREAMED, stream=True)
            findings = watch.explained(f"{n + 1:032x}" for n in range(client.asked))
            truth = server.truth()[already:]
        yield Served(alone, behind_prompt, behind_tokens, streamed, truth, findings, server.tgid)
    finally:
        server.stop()


def phases(f: Finding) -> dict[str, tuple[int, int]]:
    """The phases; they tile the request."""
    at = f.request.start_ns
    for p in f.phases:
        assert p.start_ns == at < p.end_ns
        at = p.end_ns
    assert at == f.request.end_ns
    return {p.name: (p.start_ns, p.end_ns) for p in f.phases}


def check(served: Served, asked: Asked, since_ns: int = 0) -> None:
    """Tokens are those that the client was told of; phases begin and end with the steps made for the request."""
    f, made = served.of(asked), served.steps(asked, since_ns)
    e = f.engine
    assert e is not None
    assert (e.engine, e.core_tgid, e.batch) == ("llama.cpp", served.tgid, 1)
    assert (e.prompt_tokens, e.cached_tokens) == (asked.prompt_tokens, SHARED)
    assert e.output_tokens == asked.completion_tokens
    prompts = math.ceil((asked.prompt_tokens - SHARED) / llama.BATCH)
    assert e.steps == len(made) == prompts + asked.completion_tokens - 1
    found = phases(f)
    assert made[0].begin_ns < found["prefill"][0] < made[0].end_ns
    assert made[prompts - 1].begin_ns < found["prefill"][1] < made[prompts - 1].end_ns
    assert found["decode"][0] == found["prefill"][1]
    assert made[-1].begin_ns < found["decode"][1] < made[-1].end_ns
    assert f.request.end_ns == found["delivery"][1]


def test_requests_one_after_the_other(served: Served) -> None:
    for asked in served.alone:
        check(served, asked)
        assert list(phases(served.of(asked))) == ["frontend", "prefill", "decode", "delivery"]
        assert not {"engine.queueing", "engine.prefill_interference"} & served.of(asked).causes.keys()


@pytest.mark.parametrize(
    ("pairs", "cause"),
    [("behind_prompt", "engine.prefill_interference"), ("behind_tokens", "engine.queueing")],
)
def test_of_two_at_once_the_second_waits_for_the_first(served: Served, pairs: str, cause: str) -> None:
    for first, second in getattr(served, pairs):
        assert first.begin_ns < second.begin_ns < first.end_ns < second.end_ns
        last = served.steps(first)[-1]
        check(served, first)
        check(served, second, last.end_ns)
        one, two = served.of(first), served.of(second)
        assert list(phases(one)) == ["frontend", "prefill", "decode", "delivery"]
        found = phases(two)
        assert list(found) == ["frontend", "queue", "handover", "prefill", "decode", "delivery"]
        assert last.begin_ns < found["queue"][1] < last.end_ns
        engine = {c: ms for c, ms in two.causes.items() if c.startswith("engine.")}
        assert max(engine, key=lambda c: engine[c]) == cause
        if two.verdict.cause.startswith("cpu."):  # on a busy machine that may take longer
            continue
        assert two.verdict.cause == cause
        who = two.verdict.culprit
        assert (who.kind, who.trace_id, who.span_id) == ("request", first.trace_id, "b7" * 8)
        # What it waited, and little else, is charged.
        waited = (found["queue"][1] - found["queue"][0]) / 1e6
        charged = sum(ms for c, ms in two.causes.items() if c.startswith("engine."))
        assert charged <= waited + 1e-6  # to the nanosecond
        elsewhere = sum(ms for c, ms in two.causes.items() if c.startswith(("cpu.", "unknown")))
        assert charged + elsewhere > 0.8 * waited
        assert not {"engine.queueing", "engine.prefill_interference"} & one.causes.keys()


def test_a_stream(served: Served) -> None:
    asked = served.streamed
    f, made = served.of(asked), served.steps(asked)
    found = phases(f)
    assert list(found) == ["frontend", "prefill", "decode", "delivery"]
    assert f.engine is not None
    assert f.engine.steps == len(made)
    assert f.engine.output_tokens >= STREAMED  # a character that was begun is completed
    assert asked.completion_tokens > 1
    assert found["prefill"][1] < asked.first_ns < asked.end_ns
