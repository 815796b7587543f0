"""The recorder: bounded in time and in bytes, and honest about what was lost when."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from whyspan.model import Batch
from whyspan.recorder import KEPT_BYTES, Recorder
from whyspan_probes.schema import EVENT

S = 1_000_000_000


def batch(now_s: float, *times_s: float, lost: dict[str, int] | None = None) -> Batch:
    events = np.zeros(len(times_s), EVENT)
    events["ts_ns"] = [round(t * S) for t in times_s]
    return Batch(round(now_s * S), events, lost=lost or {})


def times(recorder: Recorder, start_s: float, end_s: float) -> list[list[float]]:
    return [(e["ts_ns"] / S).tolist() for e in recorder.span(round(start_s * S), round(end_s * S))]


def test_empty() -> None:
    r = Recorder(10 * S, 1 << 20)
    assert (r.oldest_ns(), r.span(0, S), r.lost(0, S)) == (0, [], 0)
    r.add(batch(5))
    assert (r.oldest_ns(), r.span(0, 10 * S)) == (0, [])


def test_span_gives_whole_chunks_that_overlap() -> None:
    r = Recorder(100 * S, 1 << 20)
    for n in range(1, 6):
        r.add(batch(n, n - 0.9, n - 0.1))
    assert times(r, 1.5, 3.1) == [[1.1, 1.9], [2.1, 2.9], [3.1, 3.9]]
    assert times(r, 2.9, 2.9) == [[2.1, 2.9]]
    assert times(r, 2.95, 3.05) == []
    assert times(r, 9, 10) == []


def test_span_gives_the_arrays_it_was_given() -> None:
    r = Recorder(100 * S, 1 << 20)
    b = batch(1, 0.5)
    r.add(b)
    assert r.span(0, S)[0] is b.events  # an index goes by identity


def test_time_bound() -> None:
    r = Recorder(10 * S, 1 << 30)
    for n in range(1, 31):
        r.add(batch(n, n - 0.9, n - 0.1))
        assert r.oldest_ns() >= (n - 11) * S
    # At 30 s whatever ends before 20 s is gone, and nothing that was within the window.
    assert times(r, 0, 100)[0] == [20.1, 20.9]
    assert r.evicted_events == 0


def test_a_chunk_that_reaches_into_the_window_is_kept_whole() -> None:
    r = Recorder(10 * S, 1 << 30)
    r.add(batch(5, 1, 4.9))
    r.add(batch(14.8, 14))
    assert times(r, 0, 100) == [[1, 4.9], [14]]
    r.add(batch(15))
    assert times(r, 0, 100) == [[14]]
    assert r.evicted_events == 0


def test_time_bound_holds_without_new_events() -> None:
    r = Recorder(10 * S, 1 << 30)
    r.add(batch(1, 0.5))
    r.add(batch(30))
    assert r.span(0, 100 * S) == []


def test_byte_bound_takes_the_oldest_and_says_so() -> None:
    r = Recorder(1000 * S, 10 * KEPT_BYTES)
    for n in range(1, 8):
        r.add(batch(n, n - 0.9, n - 0.5, n - 0.1))
    assert [c[0] for c in times(r, 0, 100)] == [4.1, 5.1, 6.1]  # three chunks of three
    assert r.evicted_events == 4 * 3
    assert sum(len(e) for e in r.span(0, 100 * S)) * KEPT_BYTES <= 10 * KEPT_BYTES


def test_a_batch_over_the_whole_bound_is_not_kept() -> None:
    r = Recorder(1000 * S, 2 * KEPT_BYTES)
    r.add(batch(1, 0.1, 0.2, 0.3))
    assert r.span(0, S) == []
    assert r.evicted_events == 3
    r.add(batch(2, 1.5))
    assert times(r, 0, 9) == [[1.5]]


def test_lost_belongs_to_the_time_between_two_drains() -> None:
    r = Recorder(100 * S, 1 << 20)
    r.add(batch(10))
    r.add(batch(11, lost={"sched_wake": 3, "sock_recv": 4}))
    r.add(batch(12))
    r.add(batch(13, lost={"sched_wake": 5}))
    assert r.lost(10 * S, 11 * S) == 7
    assert r.lost(0, 9 * S) == 0
    assert r.lost(round(11.2 * S), round(11.8 * S)) == 0
    assert r.lost(round(10.5 * S), round(10.6 * S)) == 7
    assert r.lost(round(10.5 * S), round(12.5 * S)) == 12
    assert r.lost(14 * S, 20 * S) == 0


def test_losses_before_the_window_are_forgotten() -> None:
    r = Recorder(10 * S, 1 << 20)
    r.add(batch(1, lost={"x": 1}))
    for n in range(2, 13):
        r.add(batch(n))
    assert r.lost(0, 100 * S) == 0


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 20)), max_size=40),
    st.integers(1, 20),
    st.integers(1, 100),
)
def test_both_bounds_always_hold_and_every_event_is_kept_aged_or_counted(
    steps: list[tuple[float, int]], window_s: int, most: int
) -> None:
    r = Recorder(window_s * S, most * KEPT_BYTES)
    now, added, everything = 0.0, 0, []
    for step, count in steps:
        stamps = np.linspace(now, now + step, count + 2)[1:-1]
        now += step
        b = batch(now, *stamps)
        r.add(b)
        added += count
        everything += b.events["ts_ns"].tolist()
        kept = r.span(0, round(1e6 * S))
        ts = [t for e in kept for t in e["ts_ns"].tolist()]
        assert len(ts) <= most
        assert all(e["ts_ns"][-1] >= b.now_ns - window_s * S for e in kept)
        assert ts == everything[len(everything) - len(ts) :]  # a suffix: no hole
    in_window = sum(t >= round(now * S) - window_s * S for t in everything)
    assert len(ts if steps else []) + r.evicted_events >= in_window


def test_another_size_holds_from_the_next_batch_on() -> None:
    r = Recorder(100 * S, 1 << 20)
    for n in range(1, 6):
        r.add(batch(n, n - 0.5))
    r.resize(2 * S, 1 << 20)
    assert r.oldest_ns() == S // 2
    r.add(batch(6, 5.5))
    assert r.oldest_ns() == 9 * S // 2
    r.resize(2 * S, KEPT_BYTES)
    r.add(batch(6.1, 6.05))
    assert times(r, 0, 9) == [[6.05]]
