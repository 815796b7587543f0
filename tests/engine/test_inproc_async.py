"""The plugin under asynchronous scheduling, which vLLM does on GPUs only: its real core and scheduler, no model."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from whyspan import marks
from whyspan.marks import Mark

from tests.engine import inproc, install, vllm
from tests.engine.inproc_async_child import BLOCKS, OUTPUT, PROMPT, REQUESTS

CHILD = Path(__file__).with_name("inproc_async_child.py")

T = TypeVar("T")


class Ran(NamedTuple):
    """What was told, and what the scheduler itself counted."""

    marks: list[Mark]
    true: dict[str, Any]

    def of(self, kind: type[T]) -> list[T]:
        return [m.body for m in self.marks if isinstance(m.body, kind)]

    def ids(self) -> dict[int, str]:
        return {q.number: q.engine_id for q in self.of(marks.Queued)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Eleven requests over a pool that has room for six."""
    folder = tmp_path_factory.mktemp("async")
    model, out = vllm.write_model(folder / "model"), folder / "out.json"
    subprocess.run(
        # -P: this folder has a vllm.py of its own
        [str(install.python()), "-P", str(CHILD), str(model), str(out)],
        env={**vllm.settings(), **inproc.environment()},
        check=True,
        timeout=240,
    )
    found = json.loads(out.read_text())
    sent = [marks.decode(kind, body.encode(), ts_ns=ts, tid=1, tgid=1) for ts, kind, body in found["sent"]]
    return Ran(sent, found["true"])


def test_every_hook_is_in_place(ran: Ran) -> None:
    assert {(h.role, h.state) for h in ran.of(marks.Hello)} == {("core", "ok")}


def test_steps_are_told_at_once_and_carry_their_number(ran: Ran) -> None:
    steps = [s.step for s in ran.of(marks.Step) if s.decodes or s.others]
    assert steps == ran.true["steps"]  # as a worker reads it off the batch
    assert sorted(steps) == steps
    done = [d.step for d in ran.of(marks.StepDone)]
    assert done == steps
    order = [
        (type(m.body).__name__, m.body.step)
        for m in ran.marks
        if isinstance(m.body, marks.Step | marks.StepDone)
    ]
    first_done = order.index(("StepDone", steps[0]))
    assert order.index(("Step", steps[1])) < first_done  # two were in flight


def test_waits_are_told(ran: Ran) -> None:
    for mark in ran.marks:
        if isinstance(mark.body, marks.StepDone):
            assert 0 < mark.body.wait_ns <= mark.body.got_ns <= mark.ts_ns


def test_every_preemption_with_batches_in_flight(ran: Ran) -> None:
    ids = ran.ids()
    seen, lost, again = Counter[str](), Counter[str](), Counter[str]()
    for step in ran.of(marks.Step):
        for number, tokens in step.preempted:
            seen[ids[number]] += 1
            lost[ids[number]] += tokens
        for other in step.others:
            again[ids[other.number]] += other.recomputed
            if other.resumed:
                lost[ids[other.number]] -= other.cached
    assert seen == ran.true["preempted"] and len(seen) > 2
    assert again == +lost


def test_tokens_add_up(ran: Ran) -> None:
    computed = Counter[int]()
    for step in ran.of(marks.Step):
        computed.update(step.decodes)
        for other in step.others:
            computed[other.number] += other.tokens + other.cached
        for number, tokens in step.preempted:
            computed[number] -= tokens
    assert computed == dict.fromkeys(ran.ids(), PROMPT + OUTPUT - 1)
    assert ran.true["tokens"] == {f"r{i}": OUTPUT for i in range(REQUESTS)}
    done = ran.of(marks.StepDone)
    assert sum(d.tokens for d in done) == REQUESTS * OUTPUT
    assert sorted(f for d in done for f in d.finished) == [(n, "length") for n in sorted(ran.ids())]


def test_pool_and_queue(ran: Ran) -> None:
    for step in ran.of(marks.Step):
        assert step.kv_used + step.kv_free == BLOCKS - 1
        assert {reason for _, reason in step.deferred} <= {"capacity", "throttled"}
        assert len(step.deferred) == step.waiting
