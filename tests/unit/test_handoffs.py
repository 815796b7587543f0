"""Who waited for whom between an engine core and its workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.engines.handoffs import Handoff, Handoffs
from whyspan.engines.records import Execution, StepRun

from tests.unit.enginelab import CORE, WORK, WORK_2


def step(
    n: int, times: tuple[int, int, int, int, int, int], *runs: tuple[int, int, int], **fields: Any
) -> StepRun:
    """A step of (begin, scheduled, sent, wait, got, done) and its workers' (tid, begin, end)."""
    begin, scheduled, sent, wait, got, done = times
    found = StepRun(CORE, CORE, n, begin, scheduled, sent, wait, got, done, begin, decodes=(1,), **fields)
    found.executions = [Execution(lo, hi, tid, tid, "execute", "") for tid, lo, hi in runs]
    return found


def one_by_one() -> list[StepRun]:
    return [
        step(1, (10, 12, 13, 14, 31, 33), (WORK, 15, 30)),
        step(2, (33, 35, 36, 37, 51, 53), (WORK, 38, 50)),
    ]


def overlapped() -> list[StepRun]:
    """Each batch is sent while the one before runs; the third is late: the worker had to wait for it."""
    return [
        step(1, (10, 12, 13, 24, 31, 33), (WORK, 15, 30)),
        step(2, (20, 22, 23, 34, 51, 53), (WORK, 30, 50)),
        step(3, (60, 62, 63, 64, 81, 83), (WORK, 64, 80)),
    ]


def test_the_core_waits_for_the_worker_and_the_worker_for_the_core() -> None:
    h = Handoffs(one_by_one())
    assert h.latest(CORE, 0, 33) == Handoff(30, WORK, WORK)
    assert h.latest(WORK, 0, 30) == Handoff(13, CORE, CORE)
    assert h.latest(CORE, 0, 30) is None  # nothing had come before
    assert h.latest(WORK, 0, 50) == Handoff(36, CORE, CORE)
    assert h.latest(CORE, 0, 36) == Handoff(30, WORK, WORK)
    assert h.latest(WORK, 36, 50) is None  # in (after, before)
    assert h.knows(CORE) and h.knows(WORK) and not h.knows(WORK_2)


def test_a_batch_sent_while_the_worker_was_busy_held_nobody_up() -> None:
    h = Handoffs(overlapped())
    assert h.latest(WORK, 0, 50) == Handoff(13, CORE, CORE)  # back to back since then
    assert h.latest(WORK, 0, 80) == Handoff(63, CORE, CORE)
    assert h.latest(CORE, 0, 53) == Handoff(50, WORK, WORK)


def test_a_core_that_was_busy_elsewhere_did_not_wait() -> None:
    # The result lay ready when it began to wait.
    h = Handoffs([step(1, (10, 12, 13, 40, 41, 43), (WORK, 15, 30))])
    assert h.latest(CORE, 0, 43) is None


def test_a_worker_may_begin_before_the_core_notes_that_it_has_sent() -> None:
    h = Handoffs([step(1, (10, 12, 20, 21, 31, 33), (WORK, 15, 30))])
    assert h.latest(WORK, 0, 30) == Handoff(15, CORE, CORE)


def test_the_last_of_several_workers_held_the_core_up() -> None:
    h = Handoffs([step(1, (10, 12, 13, 14, 31, 33), (WORK, 15, 30), (WORK_2, 15, 28))])
    assert h.latest(CORE, 0, 33) == Handoff(30, WORK, WORK)


def test_workers_wait_for_the_one_that_begins_last() -> None:
    h = Handoffs([step(1, (10, 12, 13, 14, 31, 33), (WORK, 15, 30), (WORK_2, 24, 29))])
    assert h.latest(CORE, 0, 33) == Handoff(30, WORK, WORK)
    assert h.latest(WORK, 0, 30) == Handoff(24, WORK_2, WORK_2)
    assert h.latest(WORK_2, 0, 24) == Handoff(13, CORE, CORE)


def test_one_that_begins_when_another_has_ended_keeps_it_waiting_for_nothing() -> None:
    h = Handoffs([step(1, (10, 12, 13, 14, 31, 33), (WORK, 15, 20), (WORK_2, 24, 29))])
    assert h.latest(WORK, 0, 20) == Handoff(13, CORE, CORE)


def test_a_core_that_runs_the_model_itself_waits_for_nobody() -> None:
    h = Handoffs([step(1, (10, 12, 13, 14, 31, 33), (CORE, 15, 30))])
    assert h.latest(CORE, 0, 33) is None
    work = h.work_at(CORE, 20)
    assert work is not None and work.step.step == 1


def test_parts_of_a_step_are_one_piece_of_work() -> None:
    h = Handoffs([step(1, (10, 12, 13, 14, 31, 33), (WORK, 15, 20), (WORK, 22, 30))])
    assert h.latest(CORE, 0, 33) == Handoff(30, WORK, WORK)
    assert h.work_at(WORK, 21) is not None


def test_when_a_thread_is_known_to_have_worked() -> None:
    h = Handoffs(one_by_one())
    for tid, t, number in (
        (CORE, 11, 1),
        (CORE, 13, 0),
        (CORE, 32, 1),
        (WORK, 20, 1),
        (WORK, 32, 0),
        (WORK, 38, 0),
    ):
        work = h.work_at(tid, t)
        assert (work.step.step if work is not None else 0) == number, (tid, t)


def open_step() -> StepRun:
    return step(3, (53, 55, 0, 0, 0, 0))


def test_of_a_step_in_progress_the_core_awaits_the_worker_of_the_one_before() -> None:
    h = Handoffs([*one_by_one(), open_step()], pending=True)
    assert h.latest(CORE, 0, 1000) == Handoff(1000, WORK, WORK)
    assert h.latest(WORK, 0, 1000) == Handoff(55, CORE, CORE)
    assert h.latest(CORE, 0, 55) == Handoff(50, WORK, WORK)  # before, it did not


def test_what_is_in_progress_after_an_answer_was_not_waited_for() -> None:
    h = Handoffs([*one_by_one(), open_step()])
    assert h.latest(CORE, 0, 1000) == Handoff(50, WORK, WORK)


def test_of_workers_the_one_that_has_not_told_is_awaited() -> None:
    before = step(1, (10, 12, 13, 14, 31, 33), (WORK, 15, 30), (WORK_2, 15, 28))
    now = step(2, (33, 35, 0, 0, 0, 0), (WORK, 36, 50))
    h = Handoffs([before, now], pending=True)
    assert h.latest(CORE, 0, 1000) == Handoff(1000, WORK_2, WORK_2)


def test_of_workers_that_have_all_told_the_core_has_yet_to_take_the_result() -> None:
    now = step(3, (53, 55, 0, 0, 0, 0), (WORK, 56, 70))
    h = Handoffs([*one_by_one(), now], pending=True)
    assert h.latest(CORE, 0, 1000) == Handoff(70, WORK, WORK)


_T = st.integers(0, 60)


@given(
    st.lists(
        st.tuples(
            st.tuples(_T, _T, _T, _T, _T, _T),
            st.lists(st.tuples(st.sampled_from([CORE, WORK, WORK_2]), _T, _T), max_size=3),
        ),
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([CORE, WORK, WORK_2]),
    _T,
    _T,
)
def test_whatever_steps_there_are_a_hand_over_lies_where_it_was_asked_for(
    steps: list[tuple[Any, Any]], pending: bool, tid: int, a: int, b: int
) -> None:
    h = Handoffs([step(i, times, *runs) for i, (times, runs) in enumerate(steps)], pending)
    found = h.latest(tid, a, b)
    if found is not None:
        assert found.at_ns <= b and (found.at_ns > a or found.at_ns == b)
        assert found.tid != tid
    h.work_at(tid, a)


@pytest.mark.parametrize("pending", [False, True])
def test_no_steps_no_hand_overs(pending: bool) -> None:
    h = Handoffs([], pending)
    assert (h.latest(CORE, 0, 10), h.work_at(CORE, 5), h.knows(CORE)) == (None, None, False)
