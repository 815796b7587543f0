"""llama.cpp by uprobes: every step of a real server, compared with what the server's own process counted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from whyspan.config import Target, Targets
from whyspan.discovery import Discovery
from whyspan.pipeline.source import LiveSource
from whyspan_probes import safety, user_hooks
from whyspan_probes.registry import Found, discover
from whyspan_probes.schema import EVENT, Events
from whyspan_probes.state import ProbeState

from tests.bench.ports import free_port
from tests.bpf.watcher import Watcher
from tests.conftest import required_tiers
from tests.engine import llama, llama_install

pytestmark = pytest.mark.bpf  # needs root and llama.cpp, not vLLM

INFERRED = 0x80000000
REQUESTS, THREADS = 13, 3
#: Tokens that all prompts begin with, taken from the cache but for the first: <s> and the three bytes of "▁".
SHARED = 4


@pytest.fixture(scope="module", autouse=True)
def needs_llama() -> None:
    """Skip, or fail when it is required, without llama.cpp."""
    if not llama_install.installed():
        reason = "llama.cpp is not installed: `python -m tests.engine.llama_install` does it"
        if "engine" in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    return {f.probe.name: f for f in discover()}


class Served(NamedTuple):
    """What was asked of a server, what it says it did, and what the probe saw."""

    server: llama.Server
    answers: list[llama.Answer]
    truth: list[llama.Truth]
    source: LiveSource
    events: Events
    lost: dict[str, int]
    state: ProbeState

    def rows(self, name: str) -> Any:
        return self.source.schema.select(self.events, name)

    def calls(self, *names: str) -> list[llama.Truth]:
        return [t for t in self.truth if t.call in names]


@pytest.fixture(scope="module")
def served(found: dict[str, Found], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Several requests at a time to one server, watched from before the first."""
    server = llama.Server(tmp_path_factory.mktemp("llama"), free_port())
    source: LiveSource | None = None
    try:
        targets = Targets(auto=False, match=(Target(pid=server.tgid),))
        probes = [found["llama"], found["sched"]]
        source = LiveSource(probes, Discovery(targets), ring_bytes=4 << 20, header_allow=[])
        already = len(server.truth())
        answers: list[llama.Answer] = []
        events: list[Events] = [np.empty(0, EVENT)]
        lost: dict[str, int] = {}
        # Long and short prompts, each different from its first character on.
        prompts = [chr(ord("A") + i) + "x" * (17 + 61 * (i % 5)) for i in range(REQUESTS)]
        with ThreadPoolExecutor(THREADS) as pool:
            pending = [pool.submit(server.complete, p, 5 + i % 7) for i, p in enumerate(prompts)]
            while not all(p.done() for p in pending):
                source.wait(0.1)
                batch = source.drain()
                events.append(batch.events)
                lost |= batch.lost
            answers = [p.result() for p in pending]
        batch = source.drain()
        events.append(batch.events)
        lost |= batch.lost
        (state,) = (p.state for p in source.session.probes if p.probe.name == "llama")
        yield Served(server, answers, server.truth()[already:], source, np.concatenate(events), lost, state)
    finally:
        if source:
            source.close()
        server.stop()


def test_every_hook_is_on_its_file(served: Served) -> None:
    assert (served.state.state, served.state.reason) == ("attached", "")
    by = {(f.hook, Path(f.path).name.split(".")[0]): f.by for f in served.state.files}
    assert by == {
        ("step_end", "libllama"): "uretprobe.multi",
        ("step", "libllama"): "uprobe.multi",
        ("results", "libllama"): "uprobe.multi",
        ("memory", "libllama"): "uprobe.multi",
        ("graph_end", "libggml-base"): "uretprobe.multi",
        ("graph", "libggml-base"): "uprobe.multi",
        ("graph_end", "libggml-cpu"): "uretprobe.multi",
        ("graph", "libggml-cpu"): "uprobe.multi",
    }
    assert all(f.processes == [served.server.tgid] for f in served.state.files)
    assert served.lost == {}


def test_steps_seen_are_the_calls_made(served: Served) -> None:
    steps, calls = served.rows("llama_step"), served.calls("llama_decode", "llama_encode")
    assert len(steps) == len(calls) > 0
    for step, call in zip(steps, calls, strict=True):
        assert call.begin_ns < step["begin_ns"] < step["ts_ns"] < call.end_ns
        assert (step["tid"], step["tgid"]) == (call.tid, served.server.tgid)
        assert (step["tokens"], step["call"], step["aux"]) == (call.tokens, 0, call.result)
        assert step["sequences"] == 1
        assert step["looked_at"] == min(call.tokens, 32)
    starts = served.rows("llama_step_start")
    for field in ("tokens", "sequences", "outputs", "position", "context", "looked_at", "tid"):
        assert (starts[field] == steps[field]).all()
    assert (starts["ts_ns"] == steps["begin_ns"]).all()


def test_steps_are_those_that_the_tokens_need(served: Served) -> None:
    steps = served.rows("llama_step")
    # A prompt in batches; then one step for each token but the last, which nobody asks llama.cpp about.
    prompts = [math.ceil((a.prompt_tokens - SHARED) / llama.BATCH) for a in served.answers]
    assert len(served.answers) == REQUESTS
    assert max(prompts) > 1
    tokens = sum(a.prompt_tokens + a.completion_tokens - 1 for a in served.answers)
    assert steps["tokens"].sum() == tokens - SHARED * (REQUESTS - 1)
    decodes = sum(a.completion_tokens - 1 for a in served.answers)
    assert (steps["tokens"] == 1).sum() == decodes
    assert len(steps) == sum(prompts) + decodes


def test_steps_lie_within_a_request_on_the_thread_that_serves_it(served: Served) -> None:
    steps = served.rows("llama_step")
    for step in steps:
        assert any(a.begin_ns < step["begin_ns"] and step["ts_ns"] < a.end_ns for a in served.answers)
    # The thread burns CPU meanwhile: it is switched in and out by the scheduler under this very number.
    switched = set(served.rows("sched_switch_out")["tid"].tolist())
    assert set(steps["tid"].tolist()) <= switched


def test_positions_go_on_where_the_step_before_ended(served: Served) -> None:
    steps = served.rows("llama_step")
    assert steps["position"][0] == 0
    begun = 1
    for before, after in pairwise(steps):
        if after["position"] != before["position"] + before["tokens"]:
            begun += 1
            assert after["position"] == SHARED
    assert begun == REQUESTS


def test_cache_operations_are_the_calls_made(served: Served) -> None:
    ops = served.rows("llama_memory")
    calls = served.calls("llama_memory_seq_rm", "llama_memory_clear")
    assert len(ops) == len(calls) > 0
    for op, call in zip(ops, calls, strict=True):
        assert call.begin_ns < op["ts_ns"] < call.end_ns
        assert op["tid"] == call.tid
        if call.call == "llama_memory_seq_rm":
            assert [op["aux"], op["sequence"], op["from"], op["to"]] == [0, *call.arguments]
        else:
            assert op["aux"] == 2


def test_graphs_are_computed_within_steps(served: Served) -> None:
    steps, graphs = served.rows("llama_step"), served.rows("llama_graph")
    outer, inner = (graphs[graphs["by"] == by] for by in (0, 1))
    assert len(inner) >= len(outer) >= len(steps)
    assert (graphs["aux"] == 0).all()
    for step in steps:
        within = outer[(outer["begin_ns"] >= step["begin_ns"]) & (outer["ts_ns"] <= step["ts_ns"])]
        assert len(within) >= 1
        assert (within["tid"] == step["tid"]).all()
        spent = int((within["ts_ns"] - within["begin_ns"]).sum())
        assert 0 < spent < step["ts_ns"] - step["begin_ns"]
    for graph in inner:
        assert ((outer["begin_ns"] <= graph["begin_ns"]) & (outer["ts_ns"] >= graph["ts_ns"])).sum() == 1


class Batches:
    """``llama_batches.py`` under the probe."""

    def __init__(self, found: Found) -> None:
        argv = [str(llama_install.python()), str(llama.HERE / "llama_batches.py"), str(llama.model())]
        self.w = Watcher([found])
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline())
        self.w.watch(self.process.pid)
        self.w.session.follow([self.process.pid], time.monotonic())

    def run(self) -> dict[str, int]:
        out, _ = self.process.communicate("\n", timeout=60)
        results: dict[str, int] = json.loads(out)
        return results

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.w.close()


@pytest.fixture
def batches(found: dict[str, Found]) -> Iterator[Batches]:
    b = Batches(found["llama"])
    yield b
    b.close()


def test_what_a_batch_holds(batches: Batches) -> None:
    results = batches.run()
    assert list(results.values()) == [0, 0, 0, 0, 0, -1]
    steps = batches.w.rows("llama_step")
    fields = ("tokens", "sequences", "outputs", "position", "looked_at")
    assert [tuple(int(s[f]) for f in fields) for s in steps] == [
        (31, 1, 1, 0, 31),
        (23, 3, 3, 0, 23),
        (4, 4, 4, 31, 4),
        (101, 3, 3, 0, 32),  # the last is looked at too
        (5, 1, 1, -1, 5),
        (0, 0, 0, -1, 0),
    ]
    assert steps["aux"].astype(np.uint32).astype(np.int32).tolist() == list(results.values())
    assert len(set(steps["context"].tolist())) == 1
    assert len(batches.w.rows("llama_step_start")) == len(steps)
    ops = batches.w.rows("llama_memory")
    names = ("aux", "sequence", "other", "from", "to", "delta")
    assert [tuple(int(o[f]) for f in names) for o in ops] == [
        (1, 0, 4, 2, 11, 0),
        (0, 0, -1, 7, -1, 0),
        (4, 1, -1, 3, 5, 17),
        (5, 2, -1, 0, -1, 2),
        (3, 3, -1, -1, -1, 0),
        (2, -1, -1, -1, -1, 0),
    ]
    assert batches.w.dropped() == 0


def test_without_return_probes_a_step_ends_when_its_results_are_asked_for(
    found: dict[str, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = safety.refuse_user_probe
    monkeypatch.setattr(
        user_hooks,
        "refuse_user_probe",
        lambda section, *a, **k: "seccomp" if "uret" in section else refuse(section, *a, **k),
    )
    b = Batches(found["llama"])
    try:
        state = b.w.states["llama"]
        assert state.state == "partial"
        assert {(f.hook, f.state) for f in state.files} == {
            *((h, "attached") for h in ("step", "results", "memory", "graph")),
            *((h, "refused") for h in ("step_end", "graph_end")),
        }
        b.run()
        steps = b.w.rows("llama_step")
        # Of the six, the last is not followed by anything.
        assert steps["tokens"].tolist() == [31, 23, 4, 101, 5]
        assert (steps["aux"] == INFERRED).all()
        starts = b.w.rows("llama_step_start")
        assert len(starts) == 6
        assert (steps["ts_ns"] <= starts["ts_ns"][1:]).all()
        assert (steps["begin_ns"] == starts["ts_ns"][:-1]).all()
        assert len(b.w.rows("llama_graph")) == 0
    finally:
        b.close()
