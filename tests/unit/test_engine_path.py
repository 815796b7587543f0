"""The critical path through an engine that spins: marks tell who waited for whom."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import marks as m
from whyspan.causes import Context, classify, rule_out, rules
from whyspan.critical_path import Path, check, walk
from whyspan.engines import EngineTable, EngineView
from whyspan.marks import Mark
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, UNKNOWN_STATE, WAKEUP

from tests.unit.enginelab import CORE, CORE_OUT, T0, WORK, WORK_2, YIELDED, Lab, prefill
from tests.unit.lossy import lossy_events
from tests.unit.test_engine_table import MARKS, facts
from tests.unit.timeline import HOG, LOOP, EventBuilder, ns, request, shape


def of(path: Path) -> list[tuple[float, float, int, str]]:
    return [(round(a - T0, 3), round(b - T0, 3), tid, state) for a, b, tid, state in shape(path)]


def by_thread(path: Path, *states: str) -> dict[int, float]:
    out: dict[int, float] = {}
    for a, b, tid, state in shape(path):
        if not states or state in states:
            out[tid] = out.get(tid, 0) + b - a
    return {tid: round(ms, 3) for tid, ms in out.items()}


def well(path: Path) -> Path:
    """The path tiles, and nothing of it is guessed or unknown."""
    check(path)
    assert not [s for s in path.segments if s.inferred or s.state == UNKNOWN_STATE]
    return path


def test_an_ordinary_request_step_by_step() -> None:
    lab = Lab()
    lab.serve(T0, 1)
    _, _, path = lab.explained(1)
    expected = [(0, 0.9, LOOP, RUNNING), (0.9, 2.1, CORE, RUNNING)]
    for begin, end in ((1.5, 21.5), (21.5, 31.5), (31.5, 41.5), (41.5, 51.5), (51.5, 61.5)):
        expected.append((round(begin + 0.6, 3), round(end - 0.6, 3), WORK, RUNNING))
        last = end + (1.2 - 0.6) if end < 61.5 else 61.6
        expected.append((round(end - 0.6, 3), round(last, 3), CORE, RUNNING))
    expected += [
        (61.6, 61.65, CORE_OUT, WAKEUP),
        (61.65, 61.8, CORE_OUT, RUNNING),
        (61.8, 61.85, LOOP, WAKEUP),
        (61.85, 62.4, LOOP, RUNNING),
    ]
    assert of(well(path)) == expected


def overlapped(late: float = 0) -> Lab:
    """Each batch is made up and sent while the one before runs; *late* ms after that for the third."""
    lab = Lab()
    lab.arrive(T0, 1)
    at = T0 + 2
    begins = [at, at + 2, at + 20.5 + late, at + 30.5 + late]
    ends = [at + 20, at + 30, at + 40 + late, at + 50 + late]
    work = ends[:]
    start = at + 0.7
    for k in range(4):
        start = max(start, begins[k] + 0.7)
        wait = (ends[k - 1] + 1.1) if k else at + 2.7
        lab.step(
            begins[k],
            work[k] + 0.4,
            [1] if k else [],
            [] if k else [prefill(1)],
            runs=[(WORK, start, work[k])],
            sent=begins[k] + 0.6,
            wait=min(wait, work[k] - 0.2),
            finished=[1] if k == 3 else [],
            deliver=k == 3,
        )
        start = work[k]
    # The lab's `got` is half a ms before `done`: here the result is taken in 0.4 ms after the worker's end.
    lab.marks = [
        Mark(k.ts_ns, k.tid, k.tgid, msgspec.structs.replace(k.body, got_ns=k.ts_ns - 300_000))
        if isinstance(k.body, m.StepDone)
        else k
        for k in lab.marks
    ]
    return lab


def test_overlapping_steps_are_the_workers_time() -> None:
    _, _, path = overlapped().explained(1)
    spent = by_thread(well(path))
    assert spent[WORK] == pytest.approx(49.4, abs=0.5)  # back to back
    assert spent[CORE] == pytest.approx(2.4, abs=0.5)
    last = max(s.end_ns for s in path.segments if s.tid == WORK)
    inside = [s for s in path.segments if s.tid == CORE and ns(T0 + 3) < s.start_ns < last]
    assert not inside


def test_a_batch_that_comes_late_is_the_cores_time() -> None:
    _, _, path = overlapped(late=40).explained(1)
    spent = by_thread(well(path))
    # The worker had nothing from the second step's end at 32 until the third was sent at 63.1.
    ((since, until),) = [(a, b) for a, b, tid, _ in of(path) if tid == CORE and b - a > 5]
    assert (since, until) == (32, 63.1)
    assert spent[WORK] == pytest.approx(58.2, abs=0.5)


def test_a_starved_worker_is_charged_while_the_core_spins() -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.step(T0 + 2, T0 + 22, others=[prefill(1)])
    lab.out(T0 + 24, WORK, 0, next_tid=HOG, flags=0, nr=-2, cpu=2).into(T0 + 74, WORK, HOG, cpu=2)
    lab.step(T0 + 22, T0 + 82, [1], finished=[1])
    found, _, path = lab.explained(1)
    assert (24, 74, WORK, RUNNABLE) in of(well(path))
    assert found.causes["cpu.runqueue"] == pytest.approx(50)


def test_a_core_and_a_worker_that_yield_all_the_time() -> None:
    lab = Lab()
    lab.serve(T0, 1)
    for tid, cpu in ((CORE, 1), (WORK, 2)):
        for k in range(300):
            at = T0 + 0.03 + 0.2 * k
            lab.out(at, tid, 0, flags=YIELDED, nr=-2, cpu=cpu).into(at + 0.01, tid, cpu=cpu)
    _, _, path = lab.explained(1)
    spent = by_thread(well(path))
    assert spent[WORK] == pytest.approx(54, abs=0.5)
    assert spent[CORE] == pytest.approx(6.7, abs=0.5)


def test_a_core_that_sleeps_between_looks_still_waits_for_the_worker() -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.step(T0 + 2, T0 + 22, others=[prefill(1)])
    # It naps: off at 24, a timer wakes it at 74, after the worker's end at 73.
    lab.step(T0 + 22, T0 + 75, [1], runs=[(WORK, T0 + 22.7, T0 + 73)], finished=[1])
    lab.out(T0 + 24, CORE, nr=230, cpu=1).wake(T0 + 74, CORE, context=1).into(T0 + 74.05, CORE, cpu=1)
    _, _, path = lab.explained(1)
    shown = of(well(path))
    assert (22.6, 73, WORK, RUNNING) in shown
    assert (73, 74, CORE, BLOCKED) in shown


def test_the_last_rank_to_begin_is_on_the_path_until_it_does() -> None:
    lab = Lab(workers=(WORK, WORK_2))
    lab.arrive(T0, 1)
    runs = [(WORK, T0 + 2.7, T0 + 51), (WORK_2, T0 + 32, T0 + 50)]
    lab.step(T0 + 2, T0 + 52, others=[prefill(1)], runs=runs, finished=[1])
    _, _, path = lab.explained(1)
    shown = of(well(path))
    assert (2.6, 32, WORK_2, RUNNING) in shown
    assert (32, 51, WORK, RUNNING) in shown


def test_an_open_request_is_with_the_worker_of_the_step_in_progress() -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.step(T0 + 2, T0 + 22, others=[prefill(1)])
    lab.step(T0 + 22, 0, [1], end=False)
    lab.out(T0 + 40, WORK, 0, next_tid=HOG, flags=0, nr=-2, cpu=2).into(T0 + 90, WORK, HOG, cpu=2)
    wanted = msgspec.structs.replace(lab.requests()[1], end_ns=ns(T0 + 80), outcome="open")
    table, known = lab.table()
    path = well(walk(lab.timelines(0, 0), wanted, engine=EngineView(table, wanted, known)))
    assert of(path)[-2:] == [(22.5, 40, WORK, RUNNING), (40, 80, WORK, RUNNABLE)]


def test_a_request_in_the_queue_waits_for_the_step_in_progress() -> None:
    lab = Lab()
    lab.arrive(T0 - 30, 2)
    lab.step(T0 - 28, T0 - 8, others=[prefill(2)])
    lab.step(T0 - 8, 0, [2], end=False)
    lab.arrive(T0, 1, queued=T0 + 60)
    lab.into(T0 + 99, HOG)
    wanted = msgspec.structs.replace(lab.requests()[1], end_ns=ns(T0 + 90), outcome="open")
    table, known = lab.table()
    path = well(walk(lab.timelines(0, 0), wanted, engine=EngineView(table, wanted, known)))
    assert by_thread(path)[WORK] > 85


def test_without_marks_the_path_is_what_it_was() -> None:
    lab = Lab()
    lab.serve(T0, 1)
    wanted = lab.requests()[1]
    silent = EngineView(EngineTable(), wanted, facts())
    with_none = walk(lab.timelines(0, 0), wanted)
    assert walk(lab.timelines(0, 0), wanted, engine=silent) == with_none


@settings(max_examples=60)
@given(st.sets(st.integers(0, 200)), st.sets(st.integers(0, 25)), lossy_events(most=20))
def test_tiles_whatever_events_or_marks_are_lost(
    events: set[int], marks: set[int], noise: EventBuilder
) -> None:
    lab = Lab()
    lab.serve(T0, 1)
    wanted = lab.requests()[1]
    lab.rows = [row for i, row in enumerate(lab.rows) if i not in events]
    lab.rows += [(t + ns(T0) - ns(0), row) for t, row in noise.rows]
    lab.marks = [mark for i, mark in enumerate(lab.marks) if i not in marks]
    if not lab.marks:
        return
    table, known = lab.table()
    for outcome in ("ok", "open"):
        part = msgspec.structs.replace(wanted, outcome=outcome)
        view = EngineView(table, part, known)
        timelines = lab.timelines(0, 0)
        path = walk(timelines, part, engine=view)
        check(path)
        ctx = Context(timelines, part, view)
        found = classify(path, ctx)
        assert sum(found.causes.values()) == pytest.approx(part.end_ns / 1e6 - part.start_ns / 1e6)
        assert len(rule_out(found, ctx)) == len(rules())


@settings(max_examples=100)
@given(
    MARKS, lossy_events(), st.integers(0, 50), st.integers(1, 60), st.sampled_from(["ok", "open", "reset"])
)
def test_tiles_and_classifies_whatever_is_said_and_seen(
    marks: list[Mark], b: EventBuilder, start: int, length: int, outcome: str
) -> None:
    wanted = request(start, start + length, client_port=1, server_port=80, outcome=outcome)
    table = EngineTable()
    table.begun([msgspec.structs.replace(wanted, start_ns=ns(0))])
    table.feed(marks, facts(), ns(100))
    view = EngineView(table, wanted, facts())
    timelines = b.timelines(0, 0)
    path = walk(timelines, wanted, engine=view)
    check(path)
    ctx = Context(timelines, wanted, view)
    found = classify(path, ctx)
    at = wanted.start_ns
    for s in found.segments:
        assert s.start_ns == at < s.end_ns
        at = s.end_ns
    assert at == wanted.end_ns
    assert len(rule_out(found, ctx)) == len(rules())
