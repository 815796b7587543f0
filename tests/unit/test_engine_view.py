"""One request as its engine saw it: phases that tile it, the steps it was part of, the moments it changed hands."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.engines import EngineTable, EngineView, summary
from whyspan.engines.layers import outlier
from whyspan.engines.records import StepRun
from whyspan.marks import Layers, Mark

from tests.unit.enginelab import CORE, T0, Lab, prefill
from tests.unit.test_engine_table import MARKS, facts, request
from tests.unit.timeline import LOOP, SERVER, ns


def phases(view: EngineView) -> list[tuple[str, float, float]]:
    return [(p.name, (p.start_ns - ns(T0)) / 1e6, (p.end_ns - ns(T0)) / 1e6) for p in view.phases]


def served() -> Lab:
    lab = Lab()
    lab.serve(T0, 1)
    return lab


def test_phases_follow_each_other_from_the_first_byte_in_to_the_last_out() -> None:
    assert phases(served().view(1)) == [
        ("frontend", 0, 0.9),
        ("handover", 0.9, 1.4),
        ("queue", 1.4, 1.5),
        ("prefill", 1.5, 21.5),
        ("decode", 21.5, 61.5),
        ("delivery", 61.5, 62.4),
    ]


def test_the_steps_beside_a_request_are_kept_with_what_they_computed() -> None:
    lab = Lab()
    lab.serve(T0, 1)
    lab.serve(T0 + 100, 2)
    view = lab.view(1)
    facts_ = summary.facts(view)
    assert facts_ is not None
    times = facts_.step_times
    mine = [s for s in view.mine if not s.empty]
    assert [(t.batch, t.tokens, t.count, t.mine) for t in times] == [
        (s.batch, s.tokens, 1, True) for s in mine
    ]
    assert len(times) == facts_.steps > 2
    r = view.request
    assert all(r.start_ns <= t.start_ns < t.end_ns <= r.end_ns for t in times)
    assert [t.start_ns for t in times] == sorted(t.start_ns for t in times)
    assert sum(t.tokens for t in times) == sum(s.tokens for s in mine)


@given(count=st.integers(0, 3000), first=st.integers(0, 50), own=st.integers(1, 7))
@settings(deadline=None, max_examples=30)
def test_steps_of_a_long_request_are_joined_evenly(count: int, first: int, own: int) -> None:
    start, each = ns(T0), 1_000_000
    r = msgspec.structs.replace(request(1), start_ns=start, end_ns=start + max(count, 1) * each)
    steps = [
        StepRun(
            core=1, core_tid=1, step=n, begin_ns=start + (n - first) * each, scheduled_ns=0,
            done_ns=start + (n - first + 1) * each if n < count - 1 else 0, decodes=(1, 2),
            kv_used=n, kv_free=count - n,
        )
        for n in range(count)
    ]  # fmt: skip
    beside = [s for s in steps if not s.done_ns or s.done_ns > start]
    found = summary.step_times(steps, r, {s.step for s in steps if s.step % own == 0})
    assert len(found) <= summary.MAX_STEP_TIMES
    assert sum(t.count for t in found) == len(beside)
    assert sum(t.tokens for t in found) == 2 * len(beside)
    assert len({t.count for t in found[:-1]}) <= 1
    assert all(r.start_ns <= t.start_ns < t.end_ns <= r.end_ns for t in found)
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(found))
    assert all(0 <= t.kv_usage <= 1 for t in found)
    if own == 1:
        assert all(t.mine for t in found)
    if beside:
        assert found[-1].end_ns == r.end_ns  # in progress


@pytest.mark.parametrize(
    ("until", "last"),
    [(0.5, None), (1.45, "queue"), (10, "prefill"), (30, "decode"), (61.8, "delivery")],
)
def test_while_it_lasts_it_is_in_the_phase_it_is_in(until: float, last: str | None) -> None:
    lab = served()
    table, known = lab.table(T0 + until)
    wanted = msgspec.structs.replace(lab.requests()[1], end_ns=ns(T0 + until), outcome="open")
    found = EngineView(table, wanted, known).phases
    assert (found[-1].name if found else None) == last
    if found:
        assert found[-1].end_ns == ns(T0 + until)


@pytest.mark.parametrize(("at", "last"), [(1.45, "delivery"), (10, "delivery"), (35, "delivery")])
def test_one_that_was_aborted_is_over_for_the_engine(at: float, last: str) -> None:
    from whyspan import marks as m

    lab = served()
    lab.marks = [mark for mark in lab.marks if mark.ts_ns <= ns(T0 + at)]
    lab.mark(T0 + at + 0.01, CORE, m.Aborted("core", [1]))
    found = phases(lab.view(1))
    assert found[-1][0] == last
    assert found[-1][1] == pytest.approx(at + 0.01)


def test_a_part_of_a_request_has_the_phases_it_lies_in() -> None:
    lab = served()
    table, known = lab.table()
    part = msgspec.structs.replace(lab.requests()[1], start_ns=ns(T0 + 10), end_ns=ns(T0 + 40))
    view = EngineView(table, part, known)
    assert phases(view) == [("prefill", 10, 21.5), ("decode", 21.5, 40)]
    assert [s.step for s in view.mine] == [1, 2, 3]
    assert phases(view.of(lab.requests()[1])) == phases(served().view(1))


def test_the_request_changes_hands_at_the_front_ends_end_and_when_it_is_queued() -> None:
    assert served().view(1).cuts() == [(ns(T0 + 0.9), LOOP, SERVER), (ns(T0 + 1.4), CORE, CORE)]


def test_who_has_it() -> None:
    view = served().view(1)
    assert view.holder(ns(T0 + 1)) is None
    assert view.holder(ns(T0 + 30)) == (CORE, CORE)
    assert view.holder(ns(T0 + 62)) is None


def test_of_steps_in_progress_only_the_oldest_is_being_worked_at() -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.step(T0 + 2, T0 + 22, others=[prefill(1)], deliver=False)
    lab.step(T0 + 23, 0, [1], end=False)
    lab.step(T0 + 24, 0, [1], end=False)
    lab.into(T0 + 99, LOOP)
    assert [s.step for s in lab.view(1).steps] == [1, 2]


def test_steps_beside_a_request_and_those_it_was_part_of() -> None:
    lab = Lab()
    lab.arrive(T0, 2)
    lab.arrive(T0 + 5, 1)
    lab.step(T0 + 8, T0 + 28, others=[prefill(2)])
    lab.step(T0 + 28, T0 + 48, [2], [prefill(1)])
    lab.step(T0 + 48, T0 + 58, [2], finished=[2])
    lab.step(T0 + 58, T0 + 68, [1], finished=[1])
    view = lab.view(1)
    assert ([s.step for s in view.steps], [s.step for s in view.mine]) == ([1, 2, 3, 4], [2, 4])


def test_the_pool_at_a_moment() -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.step(T0 + 2, T0 + 22, others=[prefill(1)], kv_used=1, kv_free=3)
    lab.step(T0 + 22, T0 + 32, [1], finished=[1], kv_used=3, kv_free=1)
    view = lab.view(1)
    assert [view.kv_usage(ns(T0 + t)) for t in (2, 3, 22, 23)] == [-1, 0.25, 0.25, 0.75]
    assert view.kv_peak(ns(T0), ns(T0 + 50)) == 0.75


def test_a_request_that_the_engine_does_not_know() -> None:
    lab = served()
    table, known = lab.table()
    view = EngineView(table, request(), known)
    assert (view.phases, view.cuts(), view.mine, view.known, view.job) == ([], [], [], False, None)
    assert view.core == CORE  # the one core of its service
    assert summary.facts(view) is None
    assert view.holder(ns(T0)) is None


def test_what_a_finding_says_of_the_engine() -> None:
    lab = served()
    lab.hello(T0, model={"name": "tiny"})
    found = summary.facts(lab.view(1))
    assert found is not None
    assert (found.engine, found.version, found.state, found.core_tgid) == ("vllm", "0.32", "ok", CORE)
    assert (found.request_id, found.prompt_tokens, found.output_tokens, found.steps) == ("r1", 64, 5, 5)
    assert (found.batch, found.model, found.preemptions) == (1, "tiny", 0)


@settings(max_examples=200, deadline=None)
@given(MARKS, st.integers(0, 100), st.integers(0, 60), st.sampled_from(["ok", "open", "reset"]))
def test_phases_tile_and_nothing_raises_whatever_the_marks_say(
    marks: list[Mark], start: int, length: int, outcome: str
) -> None:
    table = EngineTable()
    wanted = request(cookie=1, start=start, client_port=1, outcome=outcome, end_ns=ns(start + length))
    table.begun([request(cookie=1, client_port=1)])
    table.feed(marks, facts(), ns(100))
    view = EngineView(table, wanted, facts(), {"name": "b"})
    at = wanted.start_ns
    for p in view.phases:
        assert p.start_ns == at < p.end_ns
        at = p.end_ns
    assert at == wanted.end_ns or not view.phases
    assert all(wanted.start_ns < t < wanted.end_ns for t, _, _ in view.cuts())
    assert set(map(id, view.mine)) <= set(map(id, view.steps)) or not view.mine
    assert summary.facts(view) is None or view.known
    for t in (0, wanted.start_ns, wanted.end_ns):
        assert -1 <= view.kv_usage(t) <= 1
        view.holder(t)
        view.phase_at(t)


def test_the_unusual_block_of_a_sampled_pass_is_named() -> None:
    even = [(n, kind, 1_000_000) for n in range(4) for kind in ("attention", "mlp")]
    assert outlier(Layers(rows=even)) == ""
    slow = [(n, k, 9_000_000 if (n, k) == (2, "mlp") else ns) for n, k, ns in even]
    whole = [(n, "layer", 10_000_000 if n == 2 else 2_000_000) for n in range(4)]
    assert outlier(Layers(rows=[*whole, *slow])).startswith("the mlp of layer 2 took 9.0 ms")
    assert outlier(Layers(rows=whole)).startswith("layer 2 took 10.0 ms")
    assert outlier(Layers(rows=slow[:2])) == ""
    assert outlier(Layers()) == ""
