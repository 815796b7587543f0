"""Requests that did not come to their end: whose work they were waiting for."""

from __future__ import annotations

import pytest
from whyspan.critical_path import walk
from whyspan.model import Request
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, WAKEUP

from tests.unit.timeline import (
    COOKIE,
    EPOLL_WAIT,
    FSYNC,
    FUTEX,
    LOOP,
    NANOSLEEP,
    SERVER,
    WORKER,
    D,
    EventBuilder,
    ms_of,
    request,
    shape,
)

NEXT, OTHER = 102, 103
THROTTLED_OUT = 1 | 2


def given_to_the_worker() -> EventBuilder:
    """The loop reads a head at 0, wakes the worker at 1 and rests from 3 on."""
    b = EventBuilder()
    b.tgids |= {NEXT: SERVER, OTHER: SERVER}
    b.into(-20, LOOP).into(-30, WORKER, cpu=1).out(-25, WORKER, cpu=1)
    return b.wake(1, WORKER, LOOP).into(2, WORKER, cpu=1).out(3, LOOP, nr=EPOLL_WAIT)


def client_leaves(b: EventBuilder, ms: float) -> EventBuilder:
    """The client's last packet wakes the loop, which closes the connection 1 ms later."""
    b.wake(ms - 1, LOOP, context=2, vec=3, nr=-2).into(ms - 0.9, LOOP)
    return b.out(ms + 5, LOOP, nr=EPOLL_WAIT)


def given_up(end_ms: float, outcome: str = "reset") -> Request:
    """Return a request from 0 on without an answer."""
    return request(0, end_ms, outcome=outcome, status=0, head_ns=0, first_ns=0, end_tid=0)


@pytest.mark.parametrize("outcome", ["reset", "killed", "open"])
def test_the_worker_that_was_throttled_is_what_it_waited_for(outcome: str) -> None:
    b = given_to_the_worker()
    for period in range(50):
        at = 100 * period
        b.out(at + 12, WORKER, 0, flags=THROTTLED_OUT, cpu=1, throttled_ms=85 * period)
        b.into(at + 100, WORKER, cpu=1, throttled_ms=85 * (period + 1))
    client_leaves(b, 5005)
    found, _ = b.classify(given_up(5005, outcome))
    assert ms_of(found)["cpu.throttled"] == pytest.approx(50 * 85)
    on_worker = [s for s in found.path.segments if s.tid == WORKER and s.start_ns > found.path.start_ns]
    assert all(s.inferred for s in on_worker if s.state != WAKEUP)
    # What leads to the worker's start is seen, not inferred.
    assert [(s.tid, s.state, s.inferred) for s in found.path.segments[:1]] == [(LOOP, RUNNING, False)]


def test_a_finished_request_is_walked_as_before() -> None:
    b = client_leaves(given_to_the_worker().out(20, WORKER, nr=FUTEX, cpu=1), 50)
    path, timelines = b.walk(request(0, 50))
    assert not any(s.inferred for s in path.segments)
    assert (3, 49, LOOP, BLOCKED) in shape(path)
    assert shape(walk(timelines, given_up(50)))[1] == (3, 49, LOOP, BLOCKED)  # the worker rests: nobody works


def test_work_that_was_handed_on_is_the_next_threads() -> None:
    b = given_to_the_worker()
    b.into(-30, NEXT, cpu=1).out(-25, NEXT, cpu=1)
    b.wake(5, NEXT, WORKER).into(6, NEXT, cpu=1).out(6.5, WORKER, nr=FUTEX)
    b.out(10, NEXT, D, nr=FSYNC, cpu=1)
    path, _ = client_leaves(b, 500).walk(given_up(500))
    assert shape(path) == [
        (0, 1, LOOP, RUNNING),
        (1, 2, WORKER, WAKEUP),
        (2, 5, WORKER, RUNNING),
        (5, 6, NEXT, WAKEUP),
        (6, 10, NEXT, RUNNING),
        (10, 499, NEXT, BLOCKED),
        (499, 499.1, LOOP, WAKEUP),
        (499.1, 500, LOOP, RUNNING),
    ]


def test_somebody_elses_wake_up_does_not_lead_away() -> None:
    # A worker of another request woke the loop last: this one still waits for its own.
    b = given_to_the_worker().out(8, WORKER, nr=NANOSLEEP, cpu=1)
    b.into(-30, OTHER, cpu=2).wake(60, LOOP, OTHER).into(61, LOOP).out(99, OTHER, cpu=2)
    path, _ = b.out(71, LOOP, nr=EPOLL_WAIT).walk(given_up(70))
    assert shape(path)[-3:] == [
        (8, 60, WORKER, BLOCKED),
        (60, 61, LOOP, WAKEUP),
        (61, 70, LOOP, RUNNING),
    ]
    finished, _ = b.walk(request(0, 70))
    assert (8, 60, WORKER, BLOCKED) not in shape(finished)


def test_a_thread_that_crashed_and_took_the_process_along_is_followed() -> None:
    b = given_to_the_worker()
    b.wake(40, LOOP, WORKER, nr=-2).into(40.1, LOOP).out(42, LOOP).out(43, WORKER, cpu=1)
    path, _ = b.walk(given_up(41, "killed"))
    assert shape(path)[2:] == [
        (2, 40, WORKER, RUNNING),
        (40, 40.1, LOOP, WAKEUP),
        (40.1, 41, LOOP, RUNNING),
    ]
    assert not any(s.inferred for s in path.segments)


def test_an_open_request_is_where_its_worker_is_now() -> None:
    b = given_to_the_worker().out(10, WORKER, 0, next_tid=900, flags=1, cpu=1)
    b.into(200, OTHER, cpu=3)  # others go on
    path, _ = b.walk(given_up(300, "open"))
    assert shape(path)[-1] == (10, 300, WORKER, RUNNABLE)


def test_only_the_last_slice_is_without_an_end() -> None:
    # A chunk was sent at 50 after the worker's wake-up; then nothing came.
    b = given_to_the_worker().edge("edge_write", 45, WORKER).wake(45, LOOP, WORKER, nr=1)
    b.into(46, LOOP).edge("edge_read", 46.1, LOOP).send(50, LOOP, key=COOKIE).out(51, LOOP, nr=EPOLL_WAIT)
    b.out(60, WORKER, nr=NANOSLEEP, cpu=1)
    path, _ = client_leaves(b, 900).walk(
        request(0, 900, first_ms=50, outcome="reset", chunks=1, end_tid=LOOP)
    )
    marked = {(s.tid, s.state, s.inferred) for s in path.segments}
    assert (WORKER, RUNNING, False) in marked  # before the chunk
    assert (60, 899, WORKER, BLOCKED) in shape(path)


def test_the_threads_at_work_may_be_known_from_an_earlier_slice() -> None:
    b = EventBuilder().into(-30, WORKER, cpu=1)  # nothing of the request's start is at hand
    b.out(5000, LOOP, nr=EPOLL_WAIT)
    path, timelines = client_leaves(b, 9000).walk(given_up(9000))
    assert not any(s.tid == WORKER for s in path.segments)
    part = walk(timelines, request(6000, 9000, outcome="open", end_tid=LOOP), frozenset({WORKER}))
    assert shape(part)[0] == (6000, 8999, WORKER, RUNNING)
