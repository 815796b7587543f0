"""Engines that name no requests in their steps: which steps are whose, phases, and who held up whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import marks as m
from whyspan.causes.engine_frozen import frozen_since
from whyspan.engines import anonymous, summary
from whyspan.engines.calls import Turn, assign, calls
from whyspan.engines.records import Counts, StepRun
from whyspan.engines.spans import Spans
from whyspan.engines.status import status
from whyspan.marks import Mark

from tests.unit.enginelab import T0, Lab
from tests.unit.steplab import INFERRED, WORKER_2, Steps, phases
from tests.unit.timeline import EPOLL_WAIT, FUTEX, LOOP, NANOSLEEP, SERVER, WORKER, ms_of, ns

T = 1000.0


def alone() -> Steps:
    """A prompt of two batches, then three tokens."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    last = lab.completion(T + 2, [(128, 50), (40, 20)], 3)
    lab.answer(last + 1, 1, WORKER)
    return lab


def two(prompt: list[tuple[int, float]], decodes: int, thread: int = WORKER) -> Steps:
    """The second comes 20 ms after the first; the lock is its when the first is answered."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 20, 2)
    last = lab.completion(T + 2, prompt, decodes)
    lab.answer(last + 1, 1, WORKER, then=thread)
    last = lab.completion(last + 5, [(20, 15)], 2, tid=thread)
    lab.answer(last + 1, 2, thread)
    return lab


# -- steps ----------------------------------------------------------------------------------------------------------


def told(lab: Steps) -> list[tuple[float, float, int, int, bool]]:
    table, _ = lab.table()
    return [
        ((s.begin_ns - ns(0)) / 1e6, (s.done_ns - ns(0)) / 1e6, s.core_tid, s.prefill_tokens, s.counts.first)
        for s in table.steps(SERVER, 0, ns(1e6))
        if s.counts is not None
    ]


def test_steps_of_llama_cpp() -> None:
    assert told(alone()) == [
        (1002, 1052, WORKER, 128, True),
        (1052.2, 1072.2, WORKER, 40, False),
        (1072.4, 1082.4, WORKER, 0, False),
        (1082.6, 1092.6, WORKER, 0, False),
        (1092.8, 1102.8, WORKER, 0, False),
    ]


def test_a_step_whose_beginning_was_lost_and_one_whose_end_was() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.llama(T + 1, None, 20, 4)
    said = {"context": 9, "tokens": 1, "sequences": 1, "position": 24}
    lab.add("llama_step", T + 30, WORKER, begin_ns=ns(T + 20), **said)
    lab.llama(T + 40, T + 50, 1, 25, aux=INFERRED)
    table, _ = lab.table()
    steps = table.steps(SERVER, 0, ns(1e6))
    ends = [
        (s.begin_ns - ns(T), s.done_ns - ns(T), s.counts is not None and s.counts.inferred) for s in steps
    ]
    ms = 1_000_000
    assert ends == [(ms, 20 * ms, True), (20 * ms, 30 * ms, False), (40 * ms, 50 * ms, True)]
    assert table.in_progress(SERVER) is None


def test_one_context_runs_one_step_at_a_time() -> None:
    """The end of a step was lost, and its thread does nothing any more: it is not in progress for ever."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.llama(T + 1, None, 20, 4).llama(T + 30, T + 40, 1, 24, tid=WORKER_2)
    table, _ = lab.table()
    assert table.in_progress(SERVER) is None
    assert [(s.done_ns - ns(T)) / 1e6 for s in table.steps(SERVER, 0, ns(1e6))] == [30, 40]


def test_a_step_in_progress_ends_with_its_process() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.llama(T + 1, None, 20, 4)
    table, _ = lab.table()
    step = table.in_progress(SERVER)
    assert step is not None
    assert not step.done_ns
    table.gone(SERVER, ns(T + 90))
    assert step.done_ns == ns(T + 90)
    assert table.in_progress(SERVER) is None
    assert frozen_since(table, SERVER, ns(T + 99_000)) == 0


def test_a_result_is_a_signed_number() -> None:
    lab = Steps()
    lab.llama(T, T + 1, 20, 4, aux=1).llama(T + 2, T + 3, 20, 4, aux=0xFFFFFFFF).llama(T + 4, T + 5, 1, 4)
    seen = anonymous.of_events(lab.chunk(), lab.schema)
    assert [s.counts.result for s in seen if s.begin_ns] == [1, -1, 0]


def test_expiry_and_bounds() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    for k in range(200):
        lab.llama(T + k, T + k + 0.5, 1, 4 + k)
    table, facts = lab.table()
    assert len(table.steps(SERVER, 0, ns(1e6))) == 200
    table.feed([], facts, ns(T + 60_100))
    assert len(table.steps(SERVER, 0, ns(1e6))) == 100
    table.feed([], facts, ns(T + 99_000))
    assert not table.steps(SERVER, 0, ns(1e6))


def test_an_engine_that_names_its_requests_keeps_to_that() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.mark(T + 1, WORKER, m.Queued("e", 1))
    lab.mark(T + 9, WORKER, m.Generated(ns(T + 2), 5))
    table, _ = lab.table()
    assert not table.anonymous(SERVER)
    assert not table.steps(SERVER, 0, ns(1e6))


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        (Counts(128, prefill_tokens=128, position=0), Counts(128, position=128), True),
        (Counts(128, prefill_tokens=128, position=0), Counts(128, position=4), False),
        (Counts(1, position=9), Counts(1, position=10), True),
        (Counts(1, position=9), Counts(40, position=10), False),  # the conversation's next prompt
        (Counts(5, position=10), Counts(5, position=12), True),  # three of four drafted tokens refused
        (Counts(5, position=10), Counts(5, position=10), False),
        (Counts(46, prefill_tokens=46, position=4), Counts(1, position=49), False),  # the same prompt again
        (Counts(1, position=-1), Counts(1, position=-1), True),
        (Counts(1, position=9, context=1), Counts(1, position=10, context=2), False),
    ],
)
def test_what_goes_on_with_a_sequence(before: Counts, now: Counts, goes_on: bool) -> None:
    assert anonymous._goes_on(before, now) is goes_on


# -- whose ----------------------------------------------------------------------------------------------------------


def test_phases_of_a_request_alone() -> None:
    view = alone().view(1)
    assert phases(view) == [
        ("frontend", 1000, 1002),
        ("prefill", 1002, 1072.2),
        ("decode", 1072.2, 1102.8),
        ("delivery", 1102.8, 1104.3),
    ]
    facts = summary.facts(view)
    assert facts is not None
    assert (facts.engine, facts.state, facts.core_tgid) == ("llama.cpp", "heard", SERVER)
    assert (facts.prompt_tokens, facts.cached_tokens, facts.output_tokens) == (172, 4, 4)
    assert (facts.steps, facts.batch) == (5, 1)


@pytest.mark.parametrize("thread", [WORKER, WORKER_2])
def test_the_second_of_two_waits_for_the_first(thread: int) -> None:
    lab = two([(128, 50)], 20, thread)
    first, second = lab.view(1), lab.view(2)
    assert [p[0] for p in phases(first)] == ["frontend", "prefill", "decode", "delivery"]
    assert phases(second) == [
        ("queue", 1020, 1256),
        ("handover", 1256, 1261),
        ("prefill", 1261, 1276),
        ("decode", 1276, 1296.4),
        ("delivery", 1296.4, 1297.9),
    ]
    assert [len(v.mine) for v in (first, second)] == [21, 3]
    classified, ctx, _ = lab.explained(2)
    causes = ms_of(classified)
    assert causes["engine.prefill_interference"] == 32
    assert causes["engine.queueing"] == pytest.approx(204, abs=1)
    assert ctx.engine is not None
    for cause in ("engine.queueing", "engine.prefill_interference"):
        who = classified.culprits[cause]
        assert (who.kind, who.trace_id, who.span_id) == ("request", f"{1:032x}", f"{1:016x}")
    assert not [s for s in classified.segments if s.inferred]
    assert not {c for c in ms_of(lab.explained(1)[0]) if c.startswith("engine.")}


def test_the_verdict_names_the_request_in_front() -> None:
    found = two([(512, 400)], 3).findings(3000)
    verdict = found[2].verdict
    assert verdict.cause == "engine.prefill_interference"
    assert (verdict.culprit.trace_id, verdict.culprit.detail) == (f"{1:032x}", "a prompt of 512 tokens")
    assert found[2].engine is not None
    assert found[2].engine.output_tokens == 3
    assert [p.name for p in found[2].phases][:1] == ["queue"]


def test_what_held_up_the_first_comes_before_the_queue() -> None:
    """The thread that serves the first sleeps 300 ms between two steps: the second waits, but not for steps."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 5, 2)
    lab.llama(T + 2, T + 30, 20, 4)
    lab.out(T + 31, WORKER, nr=NANOSLEEP, cpu=1).wake(T + 331, WORKER, context=1).into(T + 331, WORKER, cpu=1)
    lab.llama(T + 332, T + 342, 1, 24)
    lab.answer(T + 343, 1, WORKER, then=WORKER_2)
    lab.llama(T + 350, T + 360, 20, 4, WORKER_2)
    lab.answer(T + 361, 2, WORKER_2)
    causes = ms_of(lab.explained(2)[0])
    assert causes["engine.queueing"] == pytest.approx(312, abs=1)
    assert causes["engine.prefill_interference"] == 25


def test_requests_at_once_on_threads_of_their_own_wait_for_nobody() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 5, 2, WORKER_2)
    one = lab.generate(T + 3, 30, 10, WORKER)
    both = lab.generate(T + 7, 30, 30, WORKER_2)
    lab.answer(one + 1, 1, WORKER)
    lab.answer(both + 1, 2, WORKER_2)
    for number, tid, steps in ((1, WORKER, 11), (2, WORKER_2, 31)):
        classified, ctx, _ = lab.explained(number)
        assert ctx.engine is not None
        assert [p[0] for p in phases(ctx.engine)] == ["frontend", "prefill", "decode", "delivery"]
        assert {s.core_tid for s in ctx.engine.mine} == {tid}
        assert len(ctx.engine.mine) == steps
        assert not {c for c in ms_of(classified) if c.startswith("engine.")}


def test_the_one_that_ends_first_takes_its_own_thread() -> None:
    """Both calls end before either response is written."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 5, 2, WORKER_2)
    one = lab.generate(T + 3, 30, 10, WORKER)
    lab.generate(T + 7, 30, 9, WORKER_2)
    lab.answer(one + 10, 1, WORKER)
    lab.answer(one + 20, 2, WORKER_2)
    assert {s.core_tid for s in lab.view(1).mine} == {WORKER}
    assert {s.core_tid for s in lab.view(2).mine} == {WORKER_2}


def test_a_conversation_goes_on() -> None:
    """A short prompt that goes on where the answer before it ended: not drafted tokens of that answer."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    last = lab.completion(T + 2, [(40, 20)], 3)
    lab.answer(last + 1, 1, WORKER)
    lab.arrive(T + 200, 2, WORKER)
    lab.llama(T + 202, T + 212, 5, 47).llama(T + 213, T + 223, 1, 52)
    lab.answer(T + 224, 2, WORKER)
    assert [len(lab.view(n).mine) for n in (1, 2)] == [4, 2]
    assert [p[0] for p in phases(lab.view(2))] == ["frontend", "prefill", "decode", "delivery"]
    facts = summary.facts(lab.view(2))
    assert facts is not None
    assert (facts.prompt_tokens, facts.cached_tokens, facts.output_tokens) == (52, 47, 2)


def test_transformers_call_by_call() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 4, 2)
    one = lab.generate(T + 3, 30, 10)
    two = lab.generate(one + 2, 8, 3)  # the thread takes the next at once
    lab.answer(one + 1, 1, WORKER, rests=False)
    lab.answer(two + 1, 2, WORKER)
    view = lab.view(2)
    assert phases(view) == [
        ("queue", 1004, 1123),
        ("handover", 1123, 1125.2),
        ("prefill", 1125.2, 1145.2),
        ("decode", 1145.2, 1175.2),
        ("delivery", 1175.2, 1176.9),
    ]
    facts = summary.facts(view)
    assert facts is not None
    assert (facts.engine, facts.prompt_tokens, facts.output_tokens, facts.steps) == ("transformers", 8, 4, 4)
    assert [len(c.steps) for c in view.calls] == [11, 4]


def test_a_call_that_has_begun_waits_for_no_other() -> None:
    """Its first pass begins after another call ended, and its path comes from there: it had begun before that."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 5, 2, WORKER_2)
    lab.generate(T + 3, 30, 2, WORKER)  # to 43.2
    lab.out(T + 8, WORKER_2, nr=FUTEX, cpu=2).wake(T + 44, WORKER_2, WORKER).into(T + 44.1, WORKER_2, cpu=2)
    lab.mark(T + 60, WORKER_2, m.Generated(ns(T + 46), 30, prefill=True))
    lab.mark(T + 61, WORKER_2, m.Generated(ns(T + 7), 30, whole=True))
    lab.answer(T + 50, 1, WORKER)
    lab.answer(T + 62, 2, WORKER_2)
    view = lab.view(2)
    assert view.passes(WORKER, ns(T + 10), ns(T + 40))
    assert [p[0] for p in phases(view)] == ["frontend", "prefill", "delivery"]


def test_a_compiled_call_shows_no_phases() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.mark(T + 90, WORKER, m.Generated(ns(T + 2), 50, whole=True))
    lab.answer(T + 91, 1, WORKER)
    view = lab.view(1)
    assert not phases(view)
    assert len(view.mine) == 1
    facts = summary.facts(view)
    assert facts is not None
    assert (facts.steps, facts.prompt_tokens) == (1, 0)


def test_a_request_without_a_body_has_no_steps() -> None:
    lab = alone()
    lab.arrive(T + 60, 7, method="GET")
    lab.done(T + 80, cookie=7).send(T + 80, LOOP, key=7)
    lab.ends[7] = T + 80
    assert len(lab.view(1).mine) == 5
    view = lab.view(7)
    assert (view.phases, view.mine, summary.facts(view)) == ([], [], None)


def test_a_request_that_never_got_to_the_engine() -> None:
    """It is answered (refused, say) while another is served: the steps beside it are not its own."""
    lab = alone()
    lab.arrive(T + 60, 7)
    lab.done(T + 61, cookie=7).send(T + 61, LOOP, key=7)
    lab.ends[7] = T + 61
    view = lab.view(7)
    assert (view.phases, view.mine, view.before) == ([], [], [])


def test_steps_of_several_sequences_are_nobodys() -> None:
    """llama.cpp's own server puts several requests into a batch."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 3, 2)
    for k in range(5):
        lab.llama(T + 4 + 10 * k, T + 13 + 10 * k, 2, 50 + k, sequences=2)
    lab.answer(T + 60, 1, WORKER, rests=False)
    lab.answer(T + 70, 2, WORKER)
    for number in (1, 2):
        view = lab.view(number)
        assert (view.phases, view.mine) == ([], [])
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.llama(T + 4, T + 13, 3, 50, sequences=3)  # three completions of one request
    lab.answer(T + 60, 1, WORKER)
    assert len(lab.view(1).mine) == 1


def test_of_two_that_are_open_the_older_is_taken_to_be_served() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 1.5, 2)
    lab.llama(T + 2, T + 30, 20, 4).llama(T + 30.2, None, 1, 24)
    lab.send(T + 500, LOOP, key=99)
    first, second = lab.view(1), lab.view(2)
    assert [p[0] for p in phases(first)] == ["frontend", "prefill", "decode"]
    assert all(c.inferred for c in first.own_calls)
    assert not second.mine
    assert not second.phases


def test_while_it_waits_it_is_said_for_whom_with_less_confidence() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 200, 2)
    lab.arrive(T + 210, 3, route="/other")
    lab.completion(T + 2, [(128, 50)], 100, took=200)
    found = lab.findings(12_000)
    assert found[2].request.outcome == "open"
    assert found[2].verdict.cause == "engine.queueing"
    assert found[2].verdict.culprit.trace_id == f"{1:032x}"
    assert all(s.inferred for s in found[2].segments if s.cause == "engine.queueing")
    assert found[3].verdict.cause == "unknown"


def _turn(number: int, start: int, end: int) -> Turn:
    return Turn(f"{number:032x}", "", str(number), (number, 0), start, end)


_times = st.integers(0, 60)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 3), _times, _times, st.booleans()), max_size=12),
    st.lists(st.tuples(_times, _times), max_size=6),
)
def test_owners_were_open_all_the_while_and_serve_one_call_at_a_time(
    rows: list[tuple[int, int, int, bool]], requests: list[tuple[int, int]]
) -> None:
    turns = [_turn(i, a, a + b if b else 0) for i, (a, b) in enumerate(sorted(requests))]
    steps, last = [], dict.fromkeys((1, 2, 3), 0)
    for k, (tid, begin, took, first) in enumerate(sorted(rows, key=lambda r: r[1])):
        at = max(begin, last[tid])
        last[tid] = at + took
        steps.append(StepRun(9, tid, k, at, at, done_ns=at + took, counts=Counts(1, first=first)))
    steps.sort(key=lambda s: s.begin_ns)
    found = calls(steps, turns)
    assert sorted(s.step for c in found for s in c.steps) == list(range(len(steps)))
    assign(found, turns, None, None)
    for call in found:
        if call.owner is not None:
            assert call.owner.all_through(call.begin_ns, call.end_ns)
    for a in found:
        for b in found:
            if a.tid < b.tid and a.owner is not None and a.owner is b.owner:
                assert not (a.begin_ns < (b.end_ns or 1 << 62) and b.begin_ns < (a.end_ns or 1 << 62))


def test_the_third_waits_for_both() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 20, 2)
    lab.arrive(T + 30, 3)
    lab.arrive(T + 40, 8, method="GET")
    lab.done(T + 60, cookie=8).send(T + 60, LOOP, key=8)
    lab.ends[8] = T + 60
    last = lab.completion(T + 2, [(128, 50)], 10)
    lab.answer(last + 1, 1, WORKER, then=WORKER_2)
    last = lab.completion(last + 3, [(128, 50)], 40, tid=WORKER_2)
    lab.answer(last + 1, 2, WORKER_2, then=WORKER)
    last = lab.completion(last + 3, [(20, 10)], 2)
    lab.answer(last + 1, 3, WORKER)
    classified, ctx, _ = lab.explained(3)
    assert ctx.engine is not None
    assert [c.owner.key[0] for c in ctx.engine.before if c.owner is not None] == [1, 2]
    assert [p[0] for p in phases(ctx.engine)] == ["queue", "handover", "prefill", "decode", "delivery"]
    assert classified.culprits["engine.queueing"].trace_id == f"{2:032x}"
    who = classified.evidence["engine.queueing"][-1]
    assert who.startswith(f"by culprit: {2:032x} ")
    assert f"{1:032x}" in who


@pytest.mark.parametrize("engine", ["llama.cpp", "transformers"])
def test_a_wait_longer_than_a_slice(engine: str) -> None:
    """The second waits 20 s on another thread; it is explained in slices while it is open."""
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 200, 2)
    if engine == "llama.cpp":
        last = lab.completion(T + 2, [(128, 50)], 100, took=200)
    else:
        last = lab.generate(T + 2, 128, 100, took=200)
    lab.answer(last + 1, 1, WORKER, then=WORKER_2)
    if engine == "llama.cpp":
        last = lab.completion(last + 5, [(20, 15)], 2, tid=WORKER_2)
    else:
        last = lab.generate(last + 5, 20, 2, tid=WORKER_2)
    lab.answer(last + 1, 2, WORKER_2)
    found = lab.findings(30_000)
    assert [p.name for p in found[2].phases] == ["queue", "handover", "prefill", "decode", "delivery"]
    assert found[2].verdict.cause == "engine.queueing"
    assert found[2].verdict.culprit.trace_id == f"{1:032x}"
    # While it is open it might be in a pass of transformers of its own, which is told of at its end.
    assert found[2].causes["engine.queueing"] > (15_000 if engine == "llama.cpp" else 3_000)
    assert [p.name for p in found[1].phases] == ["frontend", "prefill", "decode", "delivery"]
    assert not {c for c in found[1].causes if c.startswith("engine.")}


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_lost_phases_tile_and_nobody_gets_anothers_steps(data: st.DataObject) -> None:
    lab = two([(128, 50), (30, 20)], 4, data.draw(st.sampled_from([WORKER, WORKER_2])))
    kept = data.draw(st.lists(st.booleans(), min_size=len(lab.rows), max_size=len(lab.rows)))
    share = data.draw(st.sampled_from([True, False]))  # all kinds may be lost, or only steps
    steps = {lab.schema.kind("llama_step"), lab.schema.kind("llama_step_start")}
    rows = zip(lab.rows, kept, strict=True)
    lab.rows = [
        r for r, keep in rows if keep or (share and int.from_bytes(r[1][16:18], "little") not in steps)
    ]
    if not lab.rows:
        return
    served = []
    for number in (1, 2):
        classified, ctx, _ = lab.explained(number)
        assert ctx.engine is not None
        phases(ctx.engine)
        served.append({s.begin_ns for s in ctx.engine.mine})
        assert sum(classified.causes.values()) * 1e6 == pytest.approx(
            ctx.request.end_ns - ctx.request.start_ns
        )
    assert not served[0] & served[1]


# -- causes ---------------------------------------------------------------------------------------------------------


def test_a_step_that_does_not_end_is_frozen_while_it_lasts() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.arrive(T + 5, 2)
    lab.llama(T + 2, T + 30, 20, 4)
    for k in range(12):
        lab.llama(T + 31 + 10 * k, T + 40 + 10 * k, 1, 24 + k)
    lab.llama(T + 160, None, 1, 36)
    lab.out(T + 165, WORKER, nr=FUTEX, cpu=1)
    lab.send(T + 9000, LOOP, key=99)
    table, _ = lab.table()
    assert frozen_since(table, SERVER, ns(T + 1000)) == 0
    assert frozen_since(table, SERVER, ns(T + 9000)) == ns(T + 160)
    for number in (1, 2):
        classified, _, _ = lab.explained(number)
        assert ms_of(classified)["engine.frozen"] > 8000
        assert classified.culprits["engine.frozen"].tid == WORKER
    found = lab.findings(9000, e2e_ms=0)
    assert "no progress of its engine" in found[1].slow_reason
    assert found[1].verdict.cause == "engine.frozen"


def test_no_place_in_the_cache_of_llama_cpp() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.llama(T + 2, T + 32, 128, 4).llama(T + 33, T + 63, 128, 132, aux=1)
    lab.answer(T + 64, 1, WORKER)
    assert ms_of(lab.explained(1)[0])["engine.kv_preemption"] == 30


def test_the_pool_of_transformers() -> None:
    lab = Steps()
    lab.arrive(T, 1, WORKER)
    lab.mark(T + 1, WORKER, m.CacheChanged("state", used_blocks=30, free_blocks=10, cached_blocks=5))
    last = lab.generate(T + 2, 30, 3)
    lab.answer(last + 1, 1, WORKER)
    facts = summary.facts(lab.view(1))
    assert facts is not None
    assert facts.kv_usage == 0.75


def sglang(first_ms: float) -> tuple[Steps, dict[str, int]]:
    """Passes of 10 ms: three with somebody waiting, plain ones, one with a prompt of somebody."""
    lab = Steps()
    lab.arrive(T, 1)
    for k in range(40):
        end = T - 150 + 10 * (k + 1)
        waiting = 2 if 12 <= k < 18 else 0
        long = 40 if k >= 30 else 0
        wall = 50 if k == 30 else 10
        body = m.Pass(
            k,
            wall_ns=wall * 1_000_000,
            prefill_requests=int(k == 30),
            prefill_tokens=512 if k == 30 else 0,
            decode_requests=3,
            queued_requests=waiting,
        )
        lab.mark(end + long, 0, body)
    if first_ms < 300:
        lab.woken(T + first_ms - 0.1).send(T + first_ms, LOOP, key=1).out(
            T + first_ms + 1, LOOP, nr=EPOLL_WAIT
        )
    lab.wake(T + 300, LOOP, context=2, vec=3).into(T + 300, LOOP)
    lab.done(T + 301, cookie=1, first_ms=T + first_ms).send(T + 301, LOOP, key=1)
    lab.ends[1] = T + 301
    return lab, {"first_ns": ns(T + first_ms)}


def test_sglang_tells_of_batches_only() -> None:
    lab, fields = sglang(60)
    classified, ctx, _ = lab.explained(1, **fields)
    assert ctx.engine is not None
    assert ctx.engine.fed
    assert (ctx.engine.phases, ctx.engine.mine) == ([], [])
    causes = ms_of(classified)
    assert causes["engine.queueing"] == pytest.approx(30, abs=2)
    assert causes["engine.prefill_interference"] == pytest.approx(40, abs=2)
    for cause in ("engine.queueing", "engine.prefill_interference"):
        assert all(s.inferred for s in classified.segments if s.cause == cause)
        who = classified.culprits[cause]
        assert (who.kind, who.tgid, who.trace_id) == ("process", SERVER, "")


def test_before_its_first_byte_a_prompt_may_be_its_own() -> None:
    lab, fields = sglang(301)
    classified, _, _ = lab.explained(1, **fields)
    assert "engine.prefill_interference" not in ms_of(classified)


def test_status_shows_them() -> None:
    table, facts = alone().table()
    (entry,) = status(table, facts, ns(T + 200))
    assert (entry["engine"], entry["role"], entry["state"]) == ("llama.cpp", "core", "heard")
    assert (entry["steps"], entry["batch"]) == (5, 1)
    assert entry["tokens_per_step"] == pytest.approx(171 / 5)


# -- the server's own span ------------------------------------------------------------------------------------------


def spanned(tid: int = LOOP, at: float = T + 0.2, parent: int = 1, trace: int = 1) -> str:
    lab = alone()
    body = m.SpanOn(f"{trace:032x}", "5" * 16, parent_id=f"{parent:016x}")
    lab.mark(at, tid, body)
    lab.mark(at + 0.1, tid, m.SpanOn(f"{trace:032x}", "6" * 16, parent_id="5" * 16, name="inner"))
    facts = summary.facts(lab.view(1))
    assert facts is not None
    return facts.server_span_id


def test_the_servers_own_span() -> None:
    assert spanned() == "5" * 16
    assert not spanned(tid=WORKER)
    assert not spanned(at=T - 1)
    assert not spanned(parent=2)
    assert not spanned(trace=2)


def test_the_servers_own_span_without_any_step() -> None:
    lab = Steps()
    lab.arrive(T, 1)
    lab.mark(T + 0.2, LOOP, m.SpanOn(f"{1:032x}", "5" * 16, parent_id=f"{1:016x}"))
    lab.woken(T + 30).done(T + 30.5, cookie=1).send(T + 30.5, LOOP, key=1)
    lab.ends[1] = T + 30.5
    found = lab.findings(2000)
    assert found[1].engine is not None
    assert (found[1].engine.server_span_id, found[1].engine.engine) == ("5" * 16, "")
    assert not found[1].phases


def test_the_servers_own_span_of_a_request_that_its_engine_names() -> None:
    lab = Lab()
    lab.mark(T0 + 0.1, LOOP, m.SpanOn(f"{1:032x}", "5" * 16, parent_id=f"{1:016x}"))
    lab.serve(T0, 1)
    facts = summary.facts(lab.view(1))
    assert facts is not None
    assert (facts.server_span_id, facts.engine) == ("5" * 16, "")
    (job,) = lab.view(1).jobs
    assert job.span == "5" * 16


def add(spans: Spans, k: int, trace_id: str) -> None:
    body = m.SpanOn(trace_id, f"{k + 1:016x}", parent_id="a" * 16)
    spans.add(Mark(k, 1, 1, body), body)


def test_spans_are_bounded() -> None:
    spans = Spans()
    for k in range(20_000):
        add(spans, k, f"{k:032x}")
    assert not spans.server((f"{1:032x}", "a" * 16), 1, 0, 1 << 60)
    assert spans.server((f"{19_999:032x}", "a" * 16), 1, 0, 1 << 60) == f"{20_000:016x}"
    for k in range(9):
        add(spans, k, "b" * 32)
    assert spans.server(("b" * 32, "a" * 16), 1, 3, 4) == f"{4:016x}"
    assert not spans.server(("b" * 32, "a" * 16), 1, 5, 6)  # the first few of a kind are enough
