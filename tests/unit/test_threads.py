"""Thread timelines: what a thread was doing at a moment, from events that may be missing."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.index import MAX_INDEXES, _cache, index_of
from whyspan.timeline import BEGINNING, BLOCKED, RUNNABLE, RUNNING, THROTTLED, UNKNOWN_STATE, WAKEUP

from tests.unit.lossy import lossy_events
from tests.unit.timeline import HOG, LOOP, MS, SCHEMA, SERVER, WORKER, D, EventBuilder, ns


def states(b: EventBuilder, tid: int, start: float, end: float) -> list[tuple[float, float, str]]:
    """Return the thread's states in an interval, times in ms."""
    found = b.timelines(start, end).thread(tid).intervals(ns(start), ns(end))
    return [((a - ns(0)) / MS, (z - ns(0)) / MS, iv.state) for a, z, iv in found]


def test_blocked_then_woken_then_running() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP).wake(30, LOOP, WORKER).into(32, LOOP).out(40, LOOP)
    assert states(b, LOOP, 0, 40) == [
        (0, 10, RUNNING),
        (10, 30, BLOCKED),
        (30, 32, WAKEUP),
        (32, 40, RUNNING),
    ]


def test_a_wait_names_its_call_waker_and_descriptor() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP, D, nr=1, arg0=2).wake(30, LOOP, HOG, nr=0).into(32, LOOP)
    b.add("fd_block", 10, LOOP, aux=3, inode=44, key=55, fd=2, syscall_nr=1)
    thread = b.timelines(0, 40).thread(LOOP)
    wait = thread.wait(thread.before(ns(20)).at)
    assert (wait.start_ns, wait.end_ns, wait.syscall_nr, wait.arg0, wait.prev_state) == (
        ns(10),
        ns(30),
        1,
        2,
        D,
    )
    assert (wait.waker_tid, wait.waker_tgid, wait.context, wait.waker_nr) == (HOG, HOG, 0, 0)
    assert wait.fd is not None
    assert (wait.fd.kind, wait.fd.inode, wait.fd.key, wait.fd.fd) == (3, 44, 55, 2)


def test_a_descriptor_belongs_to_its_own_wait_only() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP).wake(12, LOOP, HOG).into(13, LOOP)
    b.out(20, LOOP).wake(22, LOOP, HOG).into(23, LOOP).out(30, LOOP)
    b.add("fd_block", 20.001, LOOP, aux=3, fd=2)
    thread = b.timelines(0, 40).thread(LOOP)
    assert thread.wait(thread.before(ns(11)).at).fd is None
    assert thread.wait(thread.before(ns(21)).at).fd is not None


def test_preempted_is_runnable_and_names_who_ran() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP, 0, next_tid=HOG).into(14, LOOP, prev_tid=HOG).out(20, LOOP)
    assert states(b, LOOP, 0, 20) == [(0, 10, RUNNING), (10, 14, RUNNABLE), (14, 20, RUNNING)]
    thread = b.timelines(0, 20).thread(LOOP)
    rival = thread.rival(thread.before(ns(12)).at)
    assert (rival.tid, rival.tgid, rival.start_ns, rival.whole_ns) == (HOG, HOG, ns(10), 4 * MS)


def test_preempted_on_the_way_to_sleep_is_still_runnable() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP, 1, flags=5).wake(12, LOOP, WORKER).into(14, LOOP)
    assert states(b, LOOP, 5, 14) == [(5, 10, RUNNING), (10, 14, RUNNABLE)]


def test_wakes_that_change_nothing_are_ignored() -> None:
    b = EventBuilder().into(0, LOOP).wake(5, LOOP, WORKER).out(10, LOOP).wake(20, LOOP, WORKER)
    b.wake(25, LOOP, HOG).into(30, LOOP)
    assert states(b, LOOP, 0, 30) == [(0, 10, RUNNING), (10, 20, BLOCKED), (20, 30, WAKEUP)]


@pytest.mark.parametrize(
    ("out", "into", "expected"),
    [
        # The counter grew by less than the wait, by more, or not at all.
        ({"flags": 6}, {"throttled_ms": 30}, [(10, 40, THROTTLED), (40, 60, RUNNABLE)]),
        ({"flags": 4}, {"throttled_ms": 30}, [(10, 40, THROTTLED), (40, 60, RUNNABLE)]),
        ({"flags": 6}, {"throttled_ms": 90}, [(10, 60, THROTTLED)]),
        ({"flags": 4}, {"throttled_ms": 0}, [(10, 60, RUNNABLE)]),
        # Another CPU's counter says nothing: only the flag does.
        ({"flags": 6}, {"throttled_ms": 30, "cpu": 1}, [(10, 60, THROTTLED)]),
        ({"flags": 4}, {"throttled_ms": 30, "cpu": 1}, [(10, 60, RUNNABLE)]),
        ({"flags": 6, "throttled_ms": 50}, {"throttled_ms": 30}, [(10, 60, THROTTLED)]),
    ],
)
def test_throttled_part(
    out: dict[str, float], into: dict[str, float], expected: list[tuple[float, float, str]]
) -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP, 0, **out).into(60, LOOP, **into)  # type: ignore[arg-type]
    assert states(b, LOOP, 10, 60) == expected


def test_throttled_without_a_counter_is_inferred() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP, 0, flags=6).into(60, LOOP, cpu=1)
    assert b.timelines(0, 60).thread(LOOP).before(ns(60)).inferred
    b = EventBuilder().into(0, LOOP).out(10, LOOP, 0, flags=6).into(60, LOOP, throttled_ms=5)
    assert not b.timelines(0, 60).thread(LOOP).before(ns(12)).inferred


def test_throttled_after_a_wake_up() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP).wake(20, LOOP, WORKER).into(60, LOOP, throttled_ms=25)
    expected = [(10, 20, BLOCKED), (20, 45, THROTTLED), (45, 60, WAKEUP)]
    assert states(b, LOOP, 10, 60) == expected


def test_before_the_first_event() -> None:
    left = EventBuilder().out(10, LOOP).timelines(0, 10).thread(LOOP)
    assert left.before(ns(5))[:2] == (BEGINNING, RUNNING)
    got = EventBuilder().into(10, LOOP).timelines(0, 10).thread(LOOP)
    assert got.before(ns(5))[:2] == (BEGINNING, UNKNOWN_STATE)
    woken = EventBuilder().wake(10, LOOP, WORKER).into(11, LOOP).timelines(0, 10).thread(LOOP)
    assert woken.before(ns(5))[:2] == (BEGINNING, BLOCKED)
    nothing = EventBuilder().into(10, LOOP).timelines(0, 10).thread(WORKER)
    assert nothing.before(ns(5))[:2] == (BEGINNING, UNKNOWN_STATE)
    assert not nothing.known


def test_a_lost_switch_is_unknown_not_a_guess() -> None:
    b = EventBuilder().into(0, LOOP).into(20, LOOP).out(30, LOOP)
    assert states(b, LOOP, 0, 30) == [(0, 20, UNKNOWN_STATE), (20, 30, RUNNING)]
    b = EventBuilder().into(0, LOOP).out(10, LOOP).out(30, LOOP)
    assert states(b, LOOP, 0, 30) == [(0, 10, RUNNING), (10, 30, UNKNOWN_STATE)]


def test_a_lost_wake_up_leaves_the_wait_blocked_and_inferred() -> None:
    thread = EventBuilder().into(0, LOOP).out(10, LOOP).into(30, LOOP).timelines(0, 30).thread(LOOP)
    interval = thread.before(ns(30))
    assert (interval.state, interval.inferred) == (BLOCKED, True)
    assert thread.wait(interval.at).context == -1


def test_chunks_join_even_when_they_overlap() -> None:
    b = EventBuilder().into(0, LOOP).out(10, LOOP).wake(30, LOOP, WORKER).into(32, LOOP).out(40, LOOP)
    whole = b.chunk()
    timelines = b.timelines(0, 40)
    timelines._arrays = [whole[::2].copy(), whole[1::2].copy()]
    timelines._chunks = [index_of(c, SCHEMA) for c in timelines._arrays]
    assert timelines.thread(LOOP).ts == b.timelines(0, 40, 15, 31).thread(LOOP).ts


def test_thread_ids_that_share_their_low_bits_stay_apart() -> None:
    twin = LOOP + (1 << 16)
    b = EventBuilder().into(0, LOOP).into(1, twin).out(2, LOOP).out(3, twin)
    assert b.timelines(0, 5).thread(LOOP).ts == [ns(0), ns(2)]
    assert b.timelines(0, 5).thread(twin).ts == [ns(1), ns(3)]


def test_an_index_goes_with_its_array() -> None:
    chunk = EventBuilder().into(0, LOOP).chunk()
    assert index_of(chunk, SCHEMA) is index_of(chunk, SCHEMA)
    key = id(chunk)
    assert key in _cache
    del chunk
    gc.collect()
    assert key not in _cache


def test_members_and_who_used_a_cpu() -> None:
    b = EventBuilder().into(0, LOOP, cpu=1).out(10, LOOP, 0, next_tid=HOG, cpu=1)
    b.into(30, WORKER, prev_tid=HOG, cpu=1).out(34, WORKER, next_tid=LOOP, cpu=1).into(
        34, LOOP, WORKER, cpu=1
    )
    b.into(12, WORKER + 1, cpu=0)
    timelines = b.timelines(0, 40)
    assert timelines.members() == {LOOP: SERVER, WORKER: SERVER, WORKER + 1: WORKER + 1}
    assert timelines.occupancy(1, ns(10), ns(34)) == {(HOG, HOG): 20 * MS, (WORKER, SERVER): 4 * MS}


def test_a_schema_without_the_scheduler_knows_nothing() -> None:
    from whyspan.facts import Facts
    from whyspan.threads import Timelines
    from whyspan_probes.schema import EventType, Schema

    few = Schema([EventType("sock_send", 3, SCHEMA.types["sock_send"].dtype)])
    timelines = Timelines(few, [EventBuilder().into(0, LOOP).chunk()], 0, 1, Facts())
    assert timelines.thread(LOOP).before(ns(5)).state == UNKNOWN_STATE
    assert timelines.occupancy(0, 0, ns(9)) == {}
    assert not len(timelines.keyed("edge_write", "key", 5))


@settings(max_examples=150, deadline=None)
@given(lossy_events(), st.integers(0, 60), st.integers(1, 60))
def test_states_tile_any_interval_of_any_events(b: EventBuilder, start: int, length: int) -> None:
    timelines = b.timelines(start, start + length)
    for tid in (LOOP, WORKER, HOG):
        found = timelines.thread(tid).intervals(ns(start), ns(start + length))
        edges = [a for a, _, _ in found] + [found[-1][1]]
        assert edges[0] == ns(start)
        assert edges[-1] == ns(start + length)
        assert all(a < z for a, z, _ in found)
        assert [z for _, z, _ in found] == edges[1:]
        assert bool(np.all(np.diff(edges) > 0))


def test_only_the_last_used_indexes_are_kept() -> None:
    chunks = [EventBuilder().into(0, LOOP).chunk() for _ in range(MAX_INDEXES + 3)]
    made = [index_of(c, SCHEMA) for c in chunks]
    assert index_of(chunks[-1], SCHEMA) is made[-1]
    assert index_of(chunks[0], SCHEMA) is not made[0]
    assert len(_cache) <= MAX_INDEXES
