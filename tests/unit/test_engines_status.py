"""What is told of the engines at large: their state, their means, their totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from whyspan import marks as m
from whyspan.causes import engine_zombie_request
from whyspan.causes.engine_frozen import frozen_since
from whyspan.engines import EngineTable, EngineView, summary
from whyspan.engines import status as under_test
from whyspan.engines.records import Job
from whyspan.engines.status import MAX_ENGINES, Totals, fragmentation, status
from whyspan.facts import Facts
from whyspan.marks import Mark
from whyspan.model import Batch, ProcessFact, Request
from whyspan_exporters import link
from whyspan_exporters.link import StatusMsg
from whyspan_probes.schema import EVENT

from tests.unit.wire import SCHEMA

MS = 1_000_000
S = 1_000 * MS
FRONT, CORE, WORKER = 10, 11, 12
T0 = 1_000 * S


def facts_of(*services: tuple[int, str]) -> Facts:
    facts = Facts()
    known = [ProcessFact(tgid, "python", service=service) for tgid, service in services]
    facts.update(Batch(now_ns=T0, events=np.empty(0, EVENT), facts=list(known)), SCHEMA)
    return facts


@pytest.fixture
def facts() -> Facts:
    return facts_of((FRONT, "chat"), (CORE, "chat"), (WORKER, "chat"))


class Script:
    """A vLLM server that speaks; times in ms after `T0`."""

    def __init__(self, facts: Facts, table: EngineTable | None = None) -> None:
        self.table = table or EngineTable()
        self.facts = facts

    def say(self, at_ms: float, tgid: int, *bodies: m.Body) -> None:
        now = T0 + int(at_ms * MS)
        self.table.feed([Mark(now, tgid, tgid, b) for b in bodies], self.facts, now)

    def hello(self, *, state: str = "ok", missing: Iterable[str] = ()) -> None:
        for tgid, role in ((FRONT, "frontend"), (CORE, "core"), (WORKER, "worker")):
            self.say(0, tgid, m.Hello("vllm", "0.32.0", role, state=state, missing=list(missing)))

    def queue(self, at_ms: float, number: int, tokens: int, template: str = "", **arrived: object) -> None:
        name = f"cmpl-{number}"
        self.say(at_ms, FRONT, m.Arrived(name, template=template, **arrived))  # type: ignore[arg-type]
        self.say(at_ms, FRONT, m.Enqueued(name, f"{name}-0", number))
        self.say(at_ms, CORE, m.Queued(f"{name}-0", number, tokens, block_size=16))

    def step(self, at_ms: float, number: int, for_ms: float = 10, **said: object) -> None:
        begin, end = T0 + int(at_ms * MS), T0 + int((at_ms + for_ms) * MS)
        done = {k: said.pop(k) for k in ("tokens", "finished") if k in said}
        self.say(at_ms, CORE, m.Step(number, begin, begin, **said))  # type: ignore[arg-type]
        if for_ms:
            body = m.StepDone(number, begin, begin, end, **done)  # type: ignore[arg-type]
            self.say(at_ms + for_ms, CORE, body)


def two_requests(facts: Facts, table: EngineTable | None = None) -> Script:
    """Prompts of 40 and 24 tokens, of the second 16 cached; the first is preempted, and computed again."""
    s = Script(facts, table)
    s.hello()
    s.queue(1, 1, 40, "rag")
    s.queue(2, 2, 24, "secret text")
    new = [m.Scheduled(1, 40, new_blocks=3), m.Scheduled(2, 8, 16, cached=16, new_blocks=2)]
    s.step(10, 1, others=new, running=2, kv_used=5, kv_free=3, kv_cached=2, evicted=4, tokens=2)
    s.step(20, 2, decodes=[2], preempted=[(1, 40)], running=1, waiting=1, kv_used=2, kv_free=6, tokens=1)
    s.step(30, 3, running=1, waiting=1, kv_used=2, kv_free=6)  # nothing scheduled
    again = [m.Scheduled(1, 41, recomputed=40, resumed=True, new_blocks=3)]
    s.step(40, 4, 20, decodes=[2], others=again, running=2, kv_used=5, kv_free=3, kv_cached=1, tokens=2)
    return s


def at(ms: float) -> int:
    return T0 + int(ms * MS)


def test_a_core_and_its_processes(facts: Facts) -> None:
    s = two_requests(facts)
    s.say(70, FRONT, m.Health(200, MS))
    core, front, worker = status(s.table, facts, at(80), frozen_since)
    assert [e["role"] for e in (core, front, worker)] == ["core", "frontend", "worker"]
    assert (core["tgid"], core["service"], core["engine"], core["version"]) == (
        CORE,
        "chat",
        "vllm",
        "0.32.0",
    )
    assert (core["state"], core["missing"], core["frozen_s"], core["zombies"]) == ("ok", [], 0.0, 0)
    assert (core["steps"], core["running"], core["waiting"]) == (4, 2, 0)
    assert core["kv_usage"] == 5 / 8
    assert core["kv_blocks"] == {"used": 5, "cached": 1, "free": 2}
    assert core["prefix_hit_ratio"] == 16 / 64
    assert core["recompute_ratio"] == 40 / (48 + 1 + 42)
    assert (core["preemptions"], core["evicted_blocks"]) == (1, 4)
    # Means over the three steps with something in them.
    assert core["batch"] == (2 + 1 + 2) / 3
    assert core["tokens_per_step"] == (48 + 1 + 42) / 3
    assert core["step_ms"] == pytest.approx((10 + 10 + 20) / 3)
    assert (front["health"], front["steps"], front["running"], front["kv_usage"]) == (200, 0, None, None)
    assert (front["frozen_s"], worker["zombies"]) == (None, None)


def test_an_engine_at_rest_holds_nothing(facts: Facts) -> None:
    s = two_requests(facts)
    s.step(70, 5, decodes=[1, 2], running=2, kv_used=5, kv_free=3, finished=[(1, "stop"), (2, "stop")])
    resting = status(s.table, facts, at(80 + 5000))[0]
    assert (resting["running"], resting["waiting"], resting["kv_usage"]) == (0, 0, 0.0)
    assert resting["kv_blocks"] == {"used": 0, "cached": 0, "free": 8}
    assert status(s.table, facts, at(80 + 20_000))[0]["batch"] is None  # no step in the last 10 s


def test_a_frozen_core_and_what_it_holds_for_nobody(facts: Facts) -> None:
    s = two_requests(facts)
    s.step(70, 5, 0, decodes=[1, 2], running=2)
    job = s.table.jobs(CORE)[0]
    job.client_left_ns = at(70)
    core = status(s.table, facts, at(70 + 400), frozen_since)[0]
    assert (core["frozen_s"], core["zombies"]) == (0.0, 0)
    core = status(s.table, facts, at(70 + 4000), frozen_since)[0]
    assert (core["frozen_s"], core["zombies"]) == (pytest.approx(4.0), 1)
    assert under_test.ZOMBIE_NS == engine_zombie_request.GRACE_NS


def test_states_of_the_marks(facts: Facts) -> None:
    s = Script(facts)
    s.hello(state="degraded", missing=["Scheduler.schedule"])
    assert {e["state"] for e in status(s.table, facts, at(1))} == {"degraded"}
    assert status(s.table, facts, at(1))[0]["missing"] == ["Scheduler.schedule"]
    heard = Script(facts)
    heard.step(1, 1, decodes=[1])
    (core,) = status(heard.table, facts, at(20))
    assert (core["state"], core["engine"], core["role"], core["steps"]) == ("heard", "", "core", 1)


def test_a_core_that_was_killed_ends_clearly_and_then_goes(facts: Facts) -> None:
    s = two_requests(facts)
    s.step(70, 5, 0, decodes=[1, 2], running=2, kv_used=5, kv_free=3)
    s.table.gone(CORE, at(75))
    entries = status(s.table, facts, at(5000), frozen_since)
    assert [(e["tgid"], e["state"]) for e in entries] == [(FRONT, "ok"), (WORKER, "ok"), (CORE, "ended")]
    ended = entries[-1]
    assert (ended["running"], ended["kv_usage"], ended["frozen_s"], ended["batch"]) == (
        None,
        None,
        None,
        None,
    )
    assert (ended["steps"], ended["preemptions"]) == (5, 1)
    s.say(70_000, FRONT, m.Hello("vllm", role="frontend"))
    assert [e["tgid"] for e in status(s.table, facts, at(70_000))] == [FRONT, WORKER]


def test_the_number_of_an_ended_process_may_come_again(facts: Facts) -> None:
    s = two_requests(facts)
    s.table.gone(WORKER, at(75))
    assert [e["state"] for e in status(s.table, facts, at(80)) if e["tgid"] == WORKER] == ["ended"]
    s.say(90, WORKER, m.Hello("sglang", "0.5", "worker"))
    (again,) = [e for e in status(s.table, facts, at(95)) if e["tgid"] == WORKER]
    assert (again["engine"], again["state"]) == ("sglang", "ok")


def test_the_stages_of_a_start(facts: Facts) -> None:
    s = Script(facts)
    s.hello()
    s.say(3000, CORE, m.Stage("load_model", at(1000), "opt"))
    s.say(3500, CORE, m.Stage("compile", at(3000)))
    s.say(9000, CORE, m.Stage("compile", at(8500)))
    assert status(s.table, facts, at(9000))[0]["stages"] == [
        {"name": "load_model", "what": "opt", "at_ms": 0.0, "ms": 2000.0, "again": False},
        {"name": "compile", "what": "", "at_ms": 2000.0, "ms": 500.0, "again": False},
        {"name": "compile", "what": "", "at_ms": 7500.0, "ms": 500.0, "again": True},
    ]


GAUGES = {
    "running": 3.0,
    "waiting": 2.0,
    "kv_usage": 0.5,
    "prefix_queries": 100.0,
    "prefix_hits": 25.0,
    "preemptions": 7.0,
    "prompt_tokens": 1000.0,
    "generation_tokens": 50.0,
}


def test_feeds_fill_in_where_there_are_no_marks(facts: Facts) -> None:
    s = Script(facts_of((50, "sgl"), (FRONT, "chat"), (CORE, "chat")))
    s.say(1, 50, m.Gauges("sglang", GAUGES))
    s.say(1, FRONT, m.Gauges("vllm", GAUGES))
    s.say(2, CORE, m.Hello("vllm", role="core"))
    s.step(2, 1, decodes=[1], running=1)
    core, fed = status(s.table, s.facts, at(20))
    assert (core["tgid"], core["running"], core["kv_usage"]) == (
        CORE,
        1,
        None,
    )  # the marks speak for themselves
    assert (fed["tgid"], fed["service"], fed["engine"], fed["role"]) == (50, "sgl", "sglang", "server")
    assert (fed["state"], fed["running"], fed["waiting"], fed["kv_usage"]) == ("feeds", 3, 2, 0.5)
    assert (fed["prefix_hit_ratio"], fed["preemptions"], fed["steps"]) == (0.25, 7, 0)
    assert [e["tgid"] for e in status(s.table, s.facts, at(90_000))] == [CORE]  # what is old says nothing


def test_hostile_processes_stay_within_bounds() -> None:
    facts = facts_of(*((n, "s" * 300) for n in range(1, 200)))
    s = Script(facts)
    evil = "\x1b[31m\u202e" * 40
    for n in range(1, 200):
        s.say(
            1,
            n,
            m.Hello(
                evil,
                evil,
                evil,
                missing=[evil] * 64,
                config={f"{i}{evil}": evil for i in range(64)},
                model={f"{i}{evil}": evil for i in range(16)},
                state=evil,
            ),
            *(m.Stage(evil, at(0), f"{i}{evil}") for i in range(40)),
        )
        s.step(2, n, decodes=[n])
    found = status(s.table, facts, at(10))
    assert len(found) == MAX_ENGINES
    texts: list[str] = []

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for k, v in value.items():
                texts.append(k)
                walk(v)
        elif isinstance(value, list):
            for v in value:
                walk(v)
        elif isinstance(value, str):
            texts.append(value)

    walk(found)
    assert all(t.isprintable() and len(t) <= 64 for t in texts)
    assert len(link.encode(StatusMsg(1, {"engines": found}))) < link.MAX_FRAME_BYTES // 2
    msgspec.json.encode(found)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([], None),
        ([(40, 0, 3, 0)], 1 - 40 / 48),
        ([(40, 24, 1, 0)], 0.0),  # a chunk of 16 tokens so far
        ([(40, 0, 3, 1)], 1 - 40 / 48),  # the newest token is not in the cache yet
        ([(40, 0, 3, 20)], 1 - 59 / 64),  # a decode step told nothing of its block
        ([(40, 0, 0, 5)], None),  # preempted
        ([(40, 0, 3, 0), (8, 0, 1, 0)], 1 - 48 / 64),
    ],
)
def test_fragmentation(jobs: list[tuple[int, int, int, int]], expected: float | None) -> None:
    made = [
        Job(CORE, i, f"e{i}", prompt_tokens=p, prefill_left=left, blocks=b, output_tokens=out, block_size=16)
        for i, (p, left, b, out) in enumerate(jobs)
    ]
    assert fragmentation(made) == expected


def total(parts: Iterable[Counter[tuple[str, str, str]]]) -> Counter[tuple[str, str, str]]:
    return sum(parts, Counter[tuple[str, str, str]]())


def test_totals_by_service_and_engine(facts: Facts) -> None:
    s = two_requests(facts, EngineTable(templates=frozenset({"rag"})))
    totals = Totals()
    first = totals.update(s.table, facts, at(80))
    assert {k[0].removeprefix("engine_"): n for k, n in first.items() if k[1:] == ("chat", "vllm")} == {
        "steps": 4,
        "batches": 3,
        "sequences": 5,
        "tokens": 91,
        "step_ns": 50 * MS,
        "preemptions": 1,
        "recomputed": 40,
        "prompt_tokens": 64,
        "cached_tokens": 16,
        "output_tokens": 5,
        "evicted_blocks": 4,
    }
    prompts = {k: n for k, n in first.items() if k[0] == "engine_prompts"}
    assert prompts == {("engine_prompts", "chat", "rag"): 1, ("engine_prompts", "chat", "other"): 1}
    assert totals.update(s.table, facts, at(80)) == {}
    assert s.table.counts["steps"] == 4


def test_totals_survive_the_end_of_a_process(facts: Facts) -> None:
    s = two_requests(facts)
    totals, parts = Totals(), []
    parts.append(totals.update(s.table, facts, at(80)))
    s.table.gone(CORE, at(90))
    parts.append(totals.update(s.table, facts, at(95)))
    s.say(80_000, FRONT, m.Hello("vllm"))  # the core is forgotten
    parts.append(totals.update(s.table, facts, at(80_000)))
    s.step(80_010, 1, decodes=[1])  # and comes again by the same number
    parts.append(totals.update(s.table, facts, at(80_100)))
    assert total(parts)["engine_steps", "chat", "vllm"] + total(parts)["engine_steps", "chat", ""] == 5
    assert all(n > 0 for part in parts for n in part.values())


def test_totals_of_a_feed_begin_when_it_is_first_read() -> None:
    s = Script(facts_of((50, "sgl")))
    totals, parts = Totals(), []
    for prompt, out in ((1000.0, 50.0), (1500.0, 60.0), (20.0, 5.0)):  # the last after a restart
        s.say(1, 50, m.Gauges("sglang", GAUGES | {"prompt_tokens": prompt, "generation_tokens": out}))
        parts.append(totals.update(s.table, s.facts, at(2)))
    assert total(parts) == {
        ("engine_prompt_tokens", "sgl", "sglang"): 520,
        ("engine_output_tokens", "sgl", "sglang"): 15,
    }


def request_of(trace_id: str) -> Request:
    return Request(
        trace_id=trace_id,
        trace_id_source="traceparent",
        service="chat",
        tgid=FRONT,
        start_tid=FRONT,
        method="POST",
        route="/v1/completions",
        start_ns=T0,
        end_ns=at(60),
        cookie=5,
        seq=1,
        client_port=40000,
        server_port=8000,
    )


@pytest.mark.parametrize(
    ("caller", "source", "expected"),
    [("a" * 32, "a" * 32, "c" * 16), ("", "b" * 32, ""), ("a" * 32, "b" * 32, "")],
)
def test_the_servers_span_counts_only_in_the_requests_trace(
    facts: Facts, caller: str, source: str, expected: str
) -> None:
    s = Script(facts)
    request = request_of(source)
    s.table.begun([request])
    s.queue(1, 1, 40, "rag", trace_id=caller, own_span_id="c" * 16, client_port=40000, server_port=8000)
    s.step(10, 1, others=[m.Scheduled(1, 40, new_blocks=3)])
    told = summary.facts(EngineView(s.table, request, facts))
    assert told is not None
    assert told.server_span_id == expected
    assert (told.state, told.template) == ("heard", "other")
