"""Causes that an engine's marks tell: who wins the verdict, who is named, and who is not claimed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from whyspan import marks as m
from whyspan.critical_path import NET_RX
from whyspan.model import Finding, ProcessFact

from tests.unit.enginelab import (
    CORE,
    CORE_OUT,
    DECODE_MS,
    PREFILL_MS,
    T0,
    WORK,
    WORK_2,
    Lab,
    experienced,
    findings,
    prefill,
)
from tests.unit.timeline import EPOLL_WAIT, HOG, LOOP, ns
from tests.unit.wire import assert_tiles

VICTIM, OTHER, THIRD = 1, 9, 10
TRACE = f"{OTHER:032x}"


def verdict_on(lab: Lab, until: float, number: int = VICTIM) -> Finding:
    """What is said of a slow request; it tiles, whatever it is."""
    f = findings(lab, until + 600)[number]
    assert_tiles(f)
    assert f.slow
    at = f.request.start_ns
    for name, start, end in ((p.name, p.start_ns, p.end_ns) for p in f.phases):
        assert start == at < end, name
        at = end
    assert at == f.request.end_ns or not f.phases
    return f


def causes_of(f: Finding) -> set[str]:
    """The root causes that the finding's path has more than a millisecond of."""
    return {c for c, ms in f.causes.items() if ms > 1 and not c.startswith("work.") and c != "unknown"}


def served(lab: Lab, begin: float, number: int = VICTIM, took: float = DECODE_MS) -> float:
    """An ordinary request from its prompt on."""
    lab.step(begin, begin + PREFILL_MS, others=[prefill(number)])
    begin = lab.decode(begin + PREFILL_MS, [number], 3, took)
    lab.step(begin, begin + took, [number], finished=[number])
    return begin + took


def running(lab: Lab, *numbers: int, at: float = T0 - 100, **asked: Any) -> float:
    """Other requests that are decoding when the victim comes."""
    for i, number in enumerate(numbers):
        lab.arrive(at + 3 * i, number, **asked)
    begin = at + 3 * len(numbers) + 2
    lab.step(begin, begin + 20, others=[prefill(n) for n in numbers])
    return lab.decode(begin + 20, numbers, 1)


# engine.queueing and what else a wait in the queue may be


def queued(reason: str = "budget", wait_steps: int = 15) -> tuple[Lab, float]:
    """The victim waits beside two running requests for so many steps, passed over each time for a reason."""
    lab = Lab()
    at = running(lab, OTHER, THIRD)
    lab.decode(at, [OTHER, THIRD], int((T0 - at) // DECODE_MS))
    lab.arrive(T0, VICTIM)
    at = T0 + 2
    for _ in range(wait_steps):
        told: dict[str, Any] = {"deferred": [(VICTIM, reason)], "kv_used": 95, "kv_free": 5, "waiting": 1}
        lab.step(at, at + DECODE_MS, [OTHER, THIRD], **told)
        at += DECODE_MS
    lab.step(at, at + DECODE_MS, [OTHER, THIRD], finished=[OTHER])
    return lab, served(lab, at + DECODE_MS)


def test_no_slot_for_it_is_queueing() -> None:
    f = verdict_on(*queued())
    assert f.verdict.cause == "engine.queueing"
    assert f.verdict.excess_ms == pytest.approx(160, abs=5)
    assert f.verdict.confidence > 0.9
    who = f.verdict.culprit
    assert (who.kind, who.name, who.tgid) == ("process", "EngineCore", CORE)
    assert who.detail == "2 running, 1 waiting" or "max_num_seqs 2" in who.detail
    assert causes_of(f) == {"engine.queueing"}


def test_no_blocks_for_it_is_exhaustion_and_names_who_holds_most() -> None:
    lab, end = queued("capacity")
    f = verdict_on(lab, end)
    assert f.verdict.cause == "engine.kv_preemption"
    assert f.verdict.culprit.kind == "request"
    assert f.verdict.culprit.trace_id in (TRACE, f"{THIRD:032x}")
    assert "engine.queueing" not in causes_of(f)


def test_blocks_from_elsewhere_are_a_transfer() -> None:
    f = verdict_on(*queued("remote_kv"))
    assert f.verdict.cause == "engine.kv_transfer"
    assert f.verdict.culprit.tgid == CORE


def test_a_slot_held_for_a_client_that_left() -> None:
    lab, end = queued()
    lab.state(T0 - 60, aux=1, cookie=lab.fronts[OTHER][0])  # a second and more is needed for the grace
    f = verdict_on(lab, end)
    assert f.verdict.cause == "engine.queueing"  # the abort may still be on its way
    lab, end = queued(wait_steps=80)
    lab.state(T0 - 60, aux=1, cookie=lab.fronts[OTHER][0])
    f = verdict_on(lab, end)
    assert f.verdict.cause == "engine.zombie_request"
    assert (f.verdict.culprit.kind, f.verdict.culprit.trace_id) == ("request", TRACE)


def test_behind_a_long_prompt_in_the_queue_the_prompt_comes_first() -> None:
    lab = Lab()
    lab.arrive(T0 - 5, OTHER, prompt=2048)
    lab.step(T0 - 3, T0 + 250, others=[prefill(OTHER, 2048)], finished=[OTHER])
    lab.arrive(T0 + 5, VICTIM, queued=T0 + 250.1)
    f = verdict_on(lab, served(lab, T0 + 250.2))
    assert f.verdict.cause == "engine.prefill_interference"
    assert f.verdict.culprit.trace_id == TRACE


def test_waiting_for_a_slow_step_of_plain_decodes_is_queueing() -> None:
    lab = Lab()
    at = running(lab, OTHER)
    lab.step(at, T0 + 200, [OTHER])
    lab.arrive(T0 + 5, VICTIM, queued=T0 + 200.1)
    f = verdict_on(lab, served(lab, T0 + 200.2))
    assert f.verdict.cause == "engine.queueing"


# engine.prefill_interference and engine.costly_neighbour


def beside(prompt: int, took: float, **asked: Any) -> tuple[Lab, float]:
    """A prompt of another request is computed in a step of the victim's decoding."""
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    lab.arrive(T0 + 24, OTHER, prompt=prompt, **asked)
    at = lab.decode(T0 + 22, [VICTIM], 1)
    lab.step(at, at + took, [VICTIM], [prefill(OTHER, prompt)])
    at = lab.decode(at + took, [VICTIM, OTHER], 2)
    lab.step(at, at + DECODE_MS, [VICTIM, OTHER], finished=[VICTIM])
    return lab, at + DECODE_MS


def test_a_long_prompt_of_another_is_interference_and_its_trace_is_linked() -> None:
    f = verdict_on(*beside(1024, 250))
    assert f.verdict.cause == "engine.prefill_interference"
    assert f.verdict.excess_ms == pytest.approx(240, abs=5)
    who = f.verdict.culprit
    assert (who.kind, who.name, who.trace_id, who.span_id) == ("request", "r9", TRACE, f"{OTHER:016x}")
    assert who.detail == "a prompt of 1024 tokens"
    assert causes_of(f) <= {"engine.prefill_interference", "engine.queueing"}


def test_a_short_prompt_beside_a_step_that_is_slow_for_another_reason_is_not_blamed_for_it() -> None:
    f = verdict_on(*beside(32, 250))
    assert f.causes.get("engine.prefill_interference", 0) < 50


def test_its_own_prompt_is_nobody_elses_interference() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM, prompt=2048)
    lab.step(T0 + 2, T0 + 252, others=[prefill(VICTIM, 2048)], finished=[VICTIM])
    f = verdict_on(lab, T0 + 252)
    assert "engine.prefill_interference" not in f.causes


def test_drafted_tokens_of_another_are_no_prompt() -> None:
    lab = Lab()
    at = running(lab, OTHER)
    lab.arrive(T0, VICTIM)
    for _ in range(int((T0 + 2 - at) // DECODE_MS)):
        lab.step(at, at + DECODE_MS, [OTHER])
        at += DECODE_MS
    lab.step(at, at + PREFILL_MS, [OTHER], [prefill(VICTIM)])
    at += PREFILL_MS
    for k in range(4):
        drafts = [m.Scheduled(OTHER, 33, 100 + k)]
        lab.step(at, at + 40, [VICTIM], drafts, finished=[VICTIM] if k == 3 else [])
        at += 40
    assert "engine.prefill_interference" not in verdict_on(lab, at).causes


def costly(took: float = 60, asked: dict[str, Any] | None = None) -> tuple[Lab, float]:
    lab = Lab()
    lab.arrive(T0 - 30, OTHER, **(asked or {}))
    lab.step(T0 - 25, T0 - 5, others=[prefill(OTHER)])
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, [OTHER], [prefill(VICTIM)])
    at = T0 + 22
    for k in range(4):
        lab.step(at, at + took, [VICTIM, OTHER], finished=[VICTIM] if k == 3 else [])
        at += took
    return lab, at


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"logprobs": 20}, "20 logprobs per token"),
        ({"n": 8}, "n=8"),
        ({"grammar": "json"}, "structured output (json)"),
    ],
)
def test_options_of_another_that_make_steps_long(asked: dict[str, Any], words: str) -> None:
    f = verdict_on(*costly(asked=asked))
    assert f.verdict.cause == "engine.costly_neighbour"
    assert f.verdict.excess_ms == pytest.approx(200, abs=10)
    assert (f.verdict.culprit.trace_id, f.verdict.culprit.detail) == (TRACE, words)


def test_an_ordinary_neighbour_is_not_blamed_for_long_steps() -> None:
    f = verdict_on(*costly())
    assert causes_of(f) & {"engine.costly_neighbour", "engine.prefill_interference"} == set()


def test_costly_options_in_steps_of_ordinary_length_are_no_cause() -> None:
    lab, at = costly(DECODE_MS, {"logprobs": 20})
    f = findings(lab, at + 600, e2e_ms=10)[VICTIM]
    assert "engine.costly_neighbour" not in f.causes


# engine.kv_preemption


def preempted(wait: float = 150, starved: tuple[float, float] | None = None) -> tuple[Lab, float]:
    """The victim loses its blocks to another and is computed again after a while."""
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    lab.arrive(T0 + 24, OTHER)
    at = lab.decode(T0 + 22, [VICTIM], 1)
    taken = [prefill(OTHER, new_blocks=9)]
    lab.step(at, at + PREFILL_MS, others=taken, preempted=[(VICTIM, 66)], kv_used=99, kv_free=1)
    since = at + PREFILL_MS
    at = lab.decode(since, [OTHER], int(wait // DECODE_MS))
    lab.step(at - 0, at + DECODE_MS, [OTHER], finished=[OTHER])
    at += DECODE_MS
    again = m.Scheduled(VICTIM, 67, recomputed=66, resumed=True, new_blocks=5)
    lab.step(at, at + PREFILL_MS, others=[again])
    at = lab.decode(at + PREFILL_MS, [VICTIM], 2)
    lab.step(at, at + DECODE_MS, [VICTIM], finished=[VICTIM])
    if starved is not None:
        lab.out(starved[0], WORK, 0, next_tid=HOG, flags=0, nr=-2, cpu=2).into(starved[1], WORK, HOG, cpu=2)
    return lab, at + DECODE_MS


def test_a_preemption_names_who_was_given_the_blocks() -> None:
    f = verdict_on(*preempted())
    assert f.verdict.cause == "engine.kv_preemption"
    assert f.verdict.culprit.trace_id == TRACE
    assert f.verdict.excess_ms == pytest.approx(200, abs=10)
    assert "preempted; 66 computed tokens lost" in f.verdict.evidence
    assert f.engine is not None and (f.engine.preemptions, f.engine.recomputed_tokens) == (1, 66)


def test_a_hog_during_exhaustion_the_larger_excess_wins_and_the_other_is_listed() -> None:
    f = verdict_on(*preempted(250, starved=(T0 + 60.5, T0 + 130)))
    # The worker lost 70 ms of the 300 in which the victim had no blocks.
    assert f.verdict.cause == "engine.kv_preemption"
    assert f.causes["cpu.runqueue"] == pytest.approx(69, abs=2)
    assert any(line.startswith("also") or "cpu.runqueue" in line for line in f.verdict.evidence) or any(
        r.cause == "cpu.runqueue" and "ms on the path" in r.check for r in f.ruled_out
    )


def test_exhaustion_during_stress_the_larger_excess_wins_and_the_other_is_listed() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = T0 + 22
    # The worker waits for a CPU for most of three long steps; after that the victim is preempted for 40 ms.
    for _ in range(3):
        lab.out(at + 2, WORK, 0, next_tid=HOG, flags=0, nr=-2, cpu=2).into(at + 72, WORK, HOG, cpu=2)
        lab.step(at, at + 80, [VICTIM])
        at += 80
    lab.arrive(at - 20, OTHER)
    lab.step(at, at + 20, others=[prefill(OTHER)], preempted=[(VICTIM, 67)], kv_used=99, kv_free=1)
    lab.step(at + 20, at + 40, others=[m.Scheduled(VICTIM, 68, recomputed=67, resumed=True)])
    lab.step(at + 40, at + 50, [VICTIM], finished=[VICTIM])
    f = verdict_on(lab, at + 50)
    assert f.verdict.cause == "cpu.runqueue"
    assert (f.verdict.culprit.name, f.verdict.culprit.tgid) == ("hog", HOG)
    assert f.causes["cpu.runqueue"] == pytest.approx(210, abs=1)
    assert f.causes["engine.kv_preemption"] == pytest.approx(40, abs=2)


def test_a_full_pool_alone_is_no_cause() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    full: dict[str, Any] = {"kv_used": 100, "kv_free": 0}
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)], **full)
    lab.step(T0 + 22, T0 + 200, [VICTIM], finished=[VICTIM], **full)
    assert "engine.kv_preemption" not in verdict_on(lab, T0 + 200).causes


# engine.batch_timer


def napping(context: int) -> tuple[Lab, float]:
    lab = Lab()
    lab.hello(T0 - 100, config={"batch_wait_ms": "150"})
    lab.arrive(T0, VICTIM)
    lab.out(T0 + 1.6, CORE, nr=230, cpu=1)
    lab.wake(T0 + 151, CORE, HOG if context == 0 else 0, context=context).into(T0 + 151.1, CORE, cpu=1)
    return lab, served(lab, T0 + 152)


def test_an_idle_engine_that_sleeps_by_a_timer() -> None:
    f = verdict_on(*napping(1))
    assert f.verdict.cause == "engine.batch_timer"
    assert f.verdict.excess_ms == pytest.approx(149.4, abs=1)
    assert (f.verdict.culprit.tgid, f.verdict.culprit.detail) == (CORE, "batching delay of 150 ms")


def test_an_idle_engine_that_waits_for_somebody_is_no_timer() -> None:
    assert "engine.batch_timer" not in verdict_on(*napping(0)).causes


# prompts: what was not in the cache, and what was too long


def blocks(*names: str) -> str:
    return "".join(f"{abs(hash(n)) & 0xFFFFFFFF:08x}" for n in names)


def prompts(second: list[str], cached: int) -> tuple[Lab, float]:
    """Two prompts of 16 blocks of 16 tokens; the second takes 250 ms."""
    first = [f"b{i}" for i in range(16)]
    lab = Lab()

    def hashed(names: list[str]) -> dict[str, object]:
        ends = ["/".join(names[: i + 1]) for i in range(len(names))]
        return {"chain": blocks(*ends), "blocks": blocks(*names), "block_size": 16}

    lab.arrive(T0 - 100, OTHER, prompt=256, size=1600, queue=hashed(first))
    lab.step(T0 - 98, T0 - 50, others=[prefill(OTHER, 256)], finished=[OTHER])
    lab.arrive(T0, VICTIM, prompt=256, size=1000, queue=hashed(second))
    mine = m.Scheduled(VICTIM, 256 - cached, cached, cached, 16)
    lab.step(T0 + 2, T0 + 252, others=[mine], finished=[VICTIM])
    return lab, T0 + 252


def test_blocks_that_were_evicted_are_a_miss() -> None:
    f = verdict_on(*prompts([f"b{i}" for i in range(16)], 0))
    assert f.verdict.cause == "engine.prefix_miss"
    assert f.verdict.culprit.kind == "cache"
    assert "their blocks were evicted" in " ".join(f.verdict.evidence)


def test_where_a_prompt_parts_from_the_one_before_is_told() -> None:
    f = verdict_on(*prompts(["b0", "b1", "changed", *(f"b{i}" for i in range(3, 16))], 32))
    assert f.verdict.cause == "engine.prefix_miss"
    assert f.verdict.culprit.detail == "diverges at token 32"
    assert "parts from an earlier prompt at block 2 (token 32); 13 blocks after that are equal" in " ".join(
        f.verdict.evidence
    )


def test_a_prompt_like_no_other_is_no_miss() -> None:
    f = verdict_on(*prompts([f"new{i}" for i in range(16)], 0))
    assert "engine.prefix_miss" not in f.causes


def test_a_prompt_that_was_found_is_no_miss() -> None:
    f = verdict_on(*prompts([f"b{i}" for i in range(16)], 240))
    assert "engine.prefix_miss" not in f.causes


@pytest.mark.parametrize("prompt", [512, 100])
def test_far_more_tokens_than_the_body_has_bytes_for(prompt: int) -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM, prompt=prompt)
    lab.step(T0 + 2, T0 + 252, others=[prefill(VICTIM, prompt)], finished=[VICTIM])
    f = verdict_on(lab, T0 + 252)
    if prompt == 512:
        assert f.verdict.cause == "engine.token_inflation"
        assert f.verdict.culprit.detail == "512 prompt tokens from 400 bytes, usually about 64"
        assert f.verdict.excess_ms == pytest.approx(250 * (512 - 64) / 512, abs=3)
    else:
        assert "engine.token_inflation" not in f.causes


# engine.jit_compile, engine.recompile, engine.reload


def stage(name: str, *, before: bool = False, tid: int = WORK) -> tuple[Lab, float]:
    lab = Lab()
    if before:
        lab.mark(T0 - 500, tid, m.Stage(name, ns(T0 - 600), "kernel"))
    lab.arrive(T0, VICTIM)
    lab.mark(T0 + 200, tid, m.Stage(name, ns(T0 + 5), "kernel"))
    lab.step(T0 + 2, T0 + 222, others=[prefill(VICTIM)], finished=[VICTIM])
    return lab, T0 + 222


@pytest.mark.parametrize(
    ("name", "before", "cause"),
    [
        ("compile", False, "engine.jit_compile"),
        ("capture", False, "engine.jit_compile"),
        ("compile", True, "engine.recompile"),
        ("adapter", False, "engine.reload"),
        ("adapter", True, "engine.reload"),
        ("reload", False, "engine.reload"),
    ],
)
def test_stages_on_the_way(name: str, before: bool, cause: str) -> None:
    f = verdict_on(*stage(name, before=before))
    assert f.verdict.cause == cause
    assert f.verdict.excess_ms == pytest.approx(195, abs=1)
    assert (f.verdict.culprit.tgid, f.verdict.culprit.detail) == (WORK, f"{name} kernel")
    assert causes_of(f) == {cause}


def test_a_stage_of_another_service_is_no_cause() -> None:
    lab, end = stage("compile", tid=HOG)
    assert "engine.jit_compile" not in verdict_on(lab, end).causes


def test_a_compiler_that_the_worker_waits_for() -> None:
    lab = Lab()
    lab.known(ProcessFact(700, "cc1plus", service="svc", parent=WORK))
    lab.arrive(T0, VICTIM)
    lab.into(T0 - 100, 700, cpu=5)
    lab.out(T0 + 10, WORK, nr=61, cpu=2).wake(T0 + 200, WORK, 700).into(T0 + 200.1, WORK, cpu=2)
    lab.out(T0 + 201, 700, cpu=5)
    lab.step(T0 + 2, T0 + 222, others=[prefill(VICTIM)], finished=[VICTIM])
    f = verdict_on(lab, T0 + 222)
    assert f.verdict.cause == "engine.jit_compile"
    assert (f.verdict.culprit.name, f.verdict.culprit.tgid) == ("cc1plus", 700)


# engine.speculation, engine.straggler, engine.cpu_bound_step


@pytest.mark.parametrize("accepted", [0, 7])
def test_drafts_that_are_not_accepted(accepted: int) -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = T0 + 22
    for k in range(4):
        drafts = [m.Scheduled(VICTIM, 9, 64 + k)]
        last = [VICTIM] if k == 3 else []
        lab.step(at, at + 40, others=drafts, finished=last, drafted=8, accepted=accepted)
        at += 40
    f = verdict_on(lab, at)
    if accepted:
        assert "engine.speculation" not in f.causes
    else:
        assert f.verdict.cause == "engine.speculation"
        assert f.verdict.culprit.detail == "0 of 32 drafted tokens accepted"


def test_drafting_is_part_of_what_is_measured_as_decoding() -> None:
    view = None
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    lab.step(T0 + 22, T0 + 32, others=[m.Scheduled(VICTIM, 9, 64)], finished=[VICTIM])
    view = lab.view(VICTIM)
    assert [s.prefill_tokens for s in view.mine] == [64, 0]


def two_workers(late_by: float, starved: bool = False) -> tuple[Lab, float]:
    lab = Lab(workers=(WORK, WORK_2))
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at, took = T0 + 22, late_by + 10
    for k in range(2):
        runs = [(WORK, at + 0.7, at + took - 1), (WORK_2, at + 0.7 + late_by, at + took - 0.9)]
        if starved:
            lab.out(at + 0.5, WORK_2, 0, next_tid=HOG, flags=0, nr=-2, cpu=4)
            lab.into(at + 0.7 + late_by, WORK_2, HOG, cpu=4)
        lab.step(at, at + took, [VICTIM], runs=runs, finished=[VICTIM] if k else [])
        at += took
    return lab, at


def test_the_rank_that_came_last() -> None:
    f = verdict_on(*two_workers(80))
    assert f.verdict.cause == "engine.straggler"
    assert f.verdict.excess_ms == pytest.approx(160, abs=2)
    assert f.verdict.culprit.tid == WORK_2


def test_what_held_the_last_rank_up_comes_first() -> None:
    f = verdict_on(*two_workers(80, starved=True))
    assert f.verdict.cause == "cpu.runqueue"
    assert f.verdict.culprit.tgid == HOG
    assert f.causes["cpu.runqueue"] == pytest.approx(160, abs=2)


def test_ranks_that_begin_together_are_no_stragglers() -> None:
    lab = Lab(workers=(WORK, WORK_2))
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 202, others=[prefill(VICTIM)], finished=[VICTIM])
    assert "engine.straggler" not in verdict_on(lab, T0 + 202).causes


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_cores_own_work_between_passes(where: str) -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = T0 + 22
    for k in range(4):
        last = [VICTIM] if k == 3 else []
        if where == "before":
            lab.step(at, at + 50, [VICTIM], sent=at + 41, runs=[(WORK, at + 41.1, at + 49)], finished=last)
        else:
            lab.step(at, at + 50, [VICTIM], runs=[(WORK, at + 0.7, at + 9)], finished=last)
        at += 50
    if where == "after":  # the result was there at once, taking it in took its time
        lab.marks = [
            mark
            if not isinstance(mark.body, m.StepDone) or mark.body.step == 1
            else m.Mark(
                mark.ts_ns,
                mark.tid,
                mark.tgid,
                m.StepDone(
                    mark.body.step,
                    mark.body.sent_ns,
                    mark.body.wait_ns,
                    mark.ts_ns - 40_900_000,
                    1,
                    mark.body.finished,
                ),
            )
            for mark in lab.marks
        ]
    f = verdict_on(lab, at)
    assert f.verdict.cause == "engine.cpu_bound_step"
    assert f.verdict.excess_ms == pytest.approx(164, abs=5)
    assert (f.verdict.culprit.tid, f.verdict.culprit.tgid) == (CORE, CORE)
    assert ("scheduling" if where == "before" else "updating its state") in f.verdict.culprit.detail


def test_a_worker_that_takes_its_time_is_no_work_of_the_core() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 202, others=[prefill(VICTIM)], finished=[VICTIM])
    assert "engine.cpu_bound_step" not in causes_of(verdict_on(lab, T0 + 202))


# engine.ipc_copy, engine.ipc_spin


def copied(size: int) -> tuple[Lab, float]:
    """The last output is under way from the core to the front end for 150 ms."""
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = lab.decode(T0 + 22, [VICTIM], 3)
    lab.step(at, at + DECODE_MS, [VICTIM], finished=[VICTIM], deliver=False)
    done = at + DECODE_MS
    lab.wake(done + 0.1, CORE_OUT, CORE).into(done + 0.2, CORE_OUT, cpu=3)
    lab.send(done + 140, CORE_OUT, 4000, aux=1, peer=4001, bytes=size)
    lab.wake(done + 140, LOOP, CORE_OUT).into(done + 140.1, LOOP).out(done + 140.3, CORE_OUT, cpu=3)
    lab.recv(done + 150, LOOP, 4001, aux=1, peer=4000, bytes=size)
    lab.mark(done + 151, LOOP, m.Output(ns(done + 150.5), [VICTIM], [VICTIM]))
    cookie, seq = lab.fronts[VICTIM]
    lab.respond(done + 152, cookie, seq)
    lab.out(done + 153, LOOP, nr=EPOLL_WAIT)
    return lab, done + 153


def test_large_messages_between_the_processes() -> None:
    f = verdict_on(*copied(8 << 20))
    assert f.verdict.cause == "engine.ipc_copy"
    assert f.verdict.excess_ms == pytest.approx(150, abs=2)
    assert f.verdict.culprit.detail == "8.0 MiB between the engine's processes"


def test_small_messages_are_not_copied_for_long() -> None:
    assert "engine.ipc_copy" not in verdict_on(*copied(1 << 10)).causes


def starved_by(rival: int) -> tuple[Lab, float]:
    """The worker waits for its CPU while a thread has it; the core waits for the worker."""
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    lab.out(T0 + 24, WORK, 0, next_tid=rival, flags=0, nr=-2, cpu=2).into(T0 + 174, WORK, rival, cpu=2)
    lab.step(T0 + 22, T0 + 182, [VICTIM])
    at = lab.decode(T0 + 182, [VICTIM], 2)
    lab.step(at, at + DECODE_MS, [VICTIM], finished=[VICTIM])
    return lab, at + DECODE_MS


def test_a_core_that_spins_on_the_workers_cpu() -> None:
    f = verdict_on(*starved_by(CORE))
    assert f.verdict.cause == "engine.ipc_spin"
    assert f.verdict.excess_ms == pytest.approx(150, abs=1)
    assert (f.verdict.culprit.tid, f.verdict.culprit.detail) == (
        CORE,
        "polling with sched_yield, without work",
    )


def test_another_process_on_the_workers_cpu_is_no_spin() -> None:
    f = verdict_on(*starved_by(HOG))
    assert f.verdict.cause == "cpu.runqueue"
    assert "engine.ipc_spin" not in f.causes


# engine.frozen


def stopped(until: float, *, health: bool = True) -> tuple[Lab, float]:
    """A signal stops the worker in a step from 30 ms on; at *until* another one lets it go on, if that is not 0."""
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    lab.out(T0 + 30, WORK, 4, nr=-2, cpu=2)
    if health:
        lab.marks.append(m.Mark(ns(T0 + 1500), 0, LOOP, m.Health(200)))
    if not until:
        lab.step(T0 + 22, 0, [VICTIM], end=False)
        return lab, T0 + 6000
    lab.wake(until, WORK, HOG, nr=62).into(until + 0.1, WORK, cpu=2)
    lab.step(T0 + 22, until + 10, [VICTIM], finished=[VICTIM])
    return lab, until + 10


def test_a_frozen_engine_is_reported_while_it_lasts_and_without_an_objective() -> None:
    lab, until = stopped(0)
    f = findings(lab, until, e2e_ms=0)[VICTIM]
    assert_tiles(f)
    assert (f.request.outcome, f.slow) == ("open", True)
    assert "no progress of its engine for" in f.slow_reason
    assert f.wall_ns <= 4e9  # early, but for a look at its threads before
    assert f.verdict.cause == "engine.frozen"
    who = f.verdict.culprit
    assert (who.kind, who.tid) == ("thread", WORK)
    assert "stopped by a signal" in who.detail
    assert any("health answered 200" in line for line in f.verdict.evidence)


def test_a_frozen_engine_that_came_back_explains_the_request_that_waited() -> None:
    lab, until = stopped(T0 + 5000)
    f = verdict_on(lab, until)
    assert (f.request.outcome, f.verdict.cause) == ("ok", "engine.frozen")
    assert f.verdict.culprit.tid == WORK
    assert f.verdict.excess_ms == pytest.approx(4980, rel=0.02)
    assert [p.name for p in f.phases] == ["frontend", "handover", "queue", "prefill", "decode", "delivery"]


def test_a_throttled_worker_in_an_open_step_is_no_freeze_of_unknown_origin() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    for k in range(60):
        at = T0 + 30 + 100 * k
        lab.out(at, WORK, 0, flags=2, nr=-2, cpu=2, throttled_ms=95.0 * k)
        lab.into(at + 95, WORK, cpu=2, throttled_ms=95.0 * (k + 1))
    lab.step(T0 + 22, 0, [VICTIM], end=False)
    f = findings(lab, T0 + 5500, e2e_ms=0)[VICTIM]
    assert f.request.outcome == "open"
    assert f.verdict.cause == "cpu.throttled"


def test_an_engine_at_rest_is_not_frozen() -> None:
    lab = Lab()
    lab.serve(T0, 7)
    lab.arrive(T0 + 9000, VICTIM)
    lab.step(T0 + 9002, T0 + 9222, others=[prefill(VICTIM)], finished=[VICTIM])
    f = verdict_on(lab, T0 + 9222)
    assert "engine.frozen" not in f.causes


def test_a_request_that_comes_after_a_long_rest_does_not_find_a_frozen_engine() -> None:
    lab = Lab()
    lab.serve(T0, 7)
    lab.ask(T0 + 5000, cookie=999)  # a request that never gets to the engine
    lab.arrive(T0 + 9000, VICTIM)
    e = experienced(0)
    found = findings(lab, T0 + 9500, e2e_ms=0, e=e)
    assert set(found) <= {7}


def test_a_dead_core_is_not_frozen() -> None:
    lab, until = stopped(0)
    lab.exit(T0 + 100, tid=CORE)
    assert findings(lab, until, e2e_ms=0) == {}


def test_a_core_that_does_not_schedule_is_frozen_too() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    lab.out(T0 + 23, CORE, 4, nr=-2, cpu=1).wake(T0 + 4000, CORE, HOG, nr=62).into(T0 + 4000.1, CORE, cpu=1)
    lab.step(T0 + 4001, T0 + 4010, [VICTIM], finished=[VICTIM])
    f = verdict_on(lab, T0 + 4010)
    assert f.verdict.cause == "engine.frozen"
    assert (f.verdict.culprit.tid, "stopped by a signal" in f.verdict.culprit.detail) == (CORE, True)


# engine.model_changed


@pytest.mark.parametrize(("dtype", "cause"), [("float16", "engine.model_changed"), ("float32", "unknown")])
def test_slower_ordinary_work_by_another_model(dtype: str, cause: str) -> None:
    lab = Lab()
    lab.hello(T0 - 50, model={"name": "tiny", "dtype": dtype})
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 52, others=[prefill(VICTIM)])
    at = lab.decode(T0 + 52, [VICTIM], 3, 25)
    lab.step(at, at + 25, [VICTIM], finished=[VICTIM])
    f = verdict_on(lab, at + 25)
    assert f.verdict.cause == cause
    if cause != "unknown":
        assert (f.verdict.culprit.kind, f.verdict.culprit.detail) == ("model", "dtype float32 → float16")
        assert f.verdict.confidence <= 0.5


def test_a_fault_on_another_model_is_still_the_fault() -> None:
    lab, end = starved_by(HOG)
    lab.hello(T0 - 50, model={"name": "tiny", "dtype": "float16"})
    assert verdict_on(lab, end).verdict.cause == "cpu.runqueue"


# what is not the engine's


def test_a_request_that_the_engine_does_not_know_is_not_held_up_by_its_steps() -> None:
    lab = Lab()
    lab.arrive(T0, OTHER, prompt=2048)
    lab.step(T0 + 2, T0 + 300, others=[prefill(OTHER, 2048)], finished=[OTHER], deliver=False)
    lab.woken(T0 + 10).ask(T0 + 10, cookie=999, route="/v1/models", content_length=400)
    lab.out(T0 + 12, LOOP, nr=EPOLL_WAIT).wake(T0 + 250, LOOP, context=1).into(T0 + 250.1, LOOP)
    lab.respond(T0 + 255, 999).out(T0 + 256, LOOP, nr=EPOLL_WAIT)
    lab.fronts[VICTIM] = 999, 0
    f = verdict_on(lab, T0 + 300)
    assert causes_of(f) == set()
    assert f.engine is None


def test_what_the_front_end_does_during_a_long_step_is_its_own_time() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = lab.decode(T0 + 22, [VICTIM], 3)
    lab.step(at, at + DECODE_MS, [VICTIM], finished=[VICTIM], deliver=False)
    # The loop takes 40 ms for the last output; meanwhile the engine computes a long prompt.
    done = at + DECODE_MS
    lab.arrive(done - 5, OTHER, prompt=2048)
    lab.step(done + 0.01, done + 300, others=[prefill(OTHER, 2048)], deliver=False)
    lab.wake(done + 0.1, CORE_OUT, CORE).into(done + 0.2, CORE_OUT, cpu=3)
    lab.wake(done + 0.3, LOOP, CORE_OUT).into(done + 0.4, LOOP).out(done + 0.5, CORE_OUT, cpu=3)
    lab.mark(done + 40, LOOP, m.Output(ns(done + 1), [VICTIM], [VICTIM]))
    cookie, seq = lab.fronts[VICTIM]
    lab.respond(done + 41, cookie, seq).out(done + 42, LOOP, nr=EPOLL_WAIT)
    f = verdict_on(lab, done + 42)
    assert "engine.prefill_interference" not in f.causes


def test_a_long_stream_is_told_whole_although_it_is_explained_in_slices() -> None:
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = lab.decode(T0 + 22, [VICTIM], 1500)
    lab.step(at, at + DECODE_MS, [VICTIM], finished=[VICTIM])
    f = verdict_on(lab, at + DECODE_MS)
    assert f.wall_ns > 15e9
    assert f.engine is not None and (f.engine.steps, f.engine.output_tokens) == (1502, 1502)
    assert [p.name for p in f.phases] == ["frontend", "handover", "queue", "prefill", "decode", "delivery"]
    assert not [s for s in f.segments if s.state == "unknown"]


# python.frontend_saturated


def busy_loop(share: float, span: float = 1600) -> tuple[Lab, float]:
    """The loop works on others' requests in goes of 4 ms for so large a share of the time."""
    lab = Lab()
    at = T0 - span
    rest = 4 / share - 4
    while at < T0 + 300:
        lab.wake(at - 0.02, LOOP, context=2, vec=NET_RX).into(at - 0.01, LOOP)
        lab.recv(at + 1, LOOP, key=5).send(at + 3, LOOP, key=5)
        if T0 <= at < T0 + 4 + rest:
            arrived = at
            cookie = 78
            lab.fronts[VICTIM] = cookie, 0
            lab.ask(at, cookie, rport=50_078, content_length=400, recv_ns=ns(at + 0.5))
            lab.mark(at + 0.6, LOOP, m.Arrived(request="r1", client_port=50_078, server_port=8000))
        at += 4
        lab.out(at, LOOP, nr=EPOLL_WAIT)
        at += rest
    # It is handed over only 200 ms later, by a loop that was at work for others.
    gone = next(t for t in (arrived + k * (4 + rest) for k in range(1000)) if t > arrived + 200)
    lab.mark(gone + 0.5, LOOP, m.Enqueued("r1", "e1", 1)).mark(gone + 0.8, CORE, m.Queued("e1", 1, 64))
    lab.step(gone + 1, gone + 21, others=[prefill(VICTIM)], finished=[VICTIM], deliver=False)
    last = next(t for t in (arrived + k * (4 + rest) for k in range(1000)) if t > gone + 21) + 2
    lab.mark(last - 0.5, LOOP, m.Output(ns(last - 1), [1], [1]))
    lab.respond(last, cookie)
    return lab, last


def test_a_loop_that_is_busy_all_the_time_with_small_things() -> None:
    f = verdict_on(*busy_loop(0.97))
    assert f.verdict.cause == "python.frontend_saturated"
    assert (f.verdict.culprit.tid, f.verdict.culprit.tgid) == (LOOP, LOOP)
    assert re.search(r"9[78]%", f.verdict.culprit.detail)


def test_a_loop_that_rests_now_and_then_is_not_saturated() -> None:
    assert "python.frontend_saturated" not in verdict_on(*busy_loop(0.7)).causes


# net.delivery


def held_back(wakes: bool = True, others: bool = False) -> tuple[Lab, float]:
    """The last output is in the front end; the client's socket takes it 200 ms later."""
    lab = Lab()
    lab.arrive(T0, VICTIM)
    lab.step(T0 + 2, T0 + 22, others=[prefill(VICTIM)])
    at = lab.decode(T0 + 22, [VICTIM], 3)
    lab.step(at, at + DECODE_MS, [VICTIM], finished=[VICTIM], deliver=False)
    cookie, seq = lab.fronts[VICTIM]
    del lab.fronts[VICTIM]
    lab.output(at + DECODE_MS + 0.1, [VICTIM], [VICTIM])
    lab.fronts[VICTIM] = cookie, seq
    at += DECODE_MS + 1.3
    lab.add("http_response_head", at - 0.4, LOOP, aux=200, cookie=cookie, seq=seq, bytes=90)
    lab.send(at - 0.3, LOOP, key=cookie)
    if others:
        lab.arrive(at + 5, OTHER)
        lab.step(at + 10, at + 30, others=[prefill(OTHER)])
        lab.decode(at + 30, [OTHER], 16)
    end = at + 200
    if wakes:
        lab.wake(end - 0.1, LOOP, context=2, vec=NET_RX).into(end - 0.05, LOOP)
    else:
        lab.wake(end - 0.1, LOOP, CORE_OUT).into(end - 0.05, LOOP)
    lab.respond(end, cookie, seq, first_ms=at - 0.3, chunks=2)
    lab.out(end + 0.4, LOOP, nr=EPOLL_WAIT)
    return lab, end


def test_a_client_that_does_not_take_what_is_ready() -> None:
    f = verdict_on(*held_back())
    assert f.verdict.cause == "net.delivery"
    assert f.verdict.excess_ms == pytest.approx(200, abs=2)
    assert (f.verdict.culprit.kind, f.verdict.culprit.name) == ("peer", "client at port 50078")


def test_a_client_that_does_not_take_what_is_ready_while_others_are_served() -> None:
    f = verdict_on(*held_back(others=True))
    assert f.verdict.cause == "net.delivery"
    assert f.verdict.excess_ms == pytest.approx(200, abs=5)


def test_a_loop_that_waits_for_another_thread_is_no_delivery() -> None:
    assert "net.delivery" not in verdict_on(*held_back(wakes=False)).causes


def test_a_fast_client_is_no_delivery() -> None:
    lab = Lab()
    lab.serve(T0, VICTIM)
    f = findings(lab, T0 + 800, e2e_ms=10)[VICTIM]
    assert "net.delivery" not in f.causes
