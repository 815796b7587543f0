"""Gaps and restarts by sequence number, and a feed's time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from whyspan.feeds import timing
from whyspan.feeds.sequence import Sequence, number


def places(seqs: list[int]) -> list[tuple[int, bool]]:
    s = Sequence()
    out = []
    for seq in seqs:
        out.append(tuple(s.place(seq)))
        s.advance(seq)
    return out  # type: ignore[return-value]


def test_the_first_message_misses_nothing() -> None:
    assert places([17, 18]) == [(0, False), (0, False)]


def test_a_gap_is_counted_once() -> None:
    assert places([0, 1, 5, 6]) == [(0, False), (0, False), (3, False), (0, False)]


def test_a_smaller_number_is_another_publisher() -> None:
    assert places([7, 8, 0, 1]) == [(0, False), (0, False), (0, True), (0, False)]
    assert places([7, 8, 3]) == [(0, False), (0, False), (3, True)]
    assert places([7, 7]) == [(0, False), (7, True)]


def test_a_number_is_eight_bytes() -> None:
    assert number((5).to_bytes(8, "big")) == 5
    assert number(b"\xff" * 8) == -1
    assert number(b"") is number(b"\0" * 9) is None


@given(st.floats(allow_nan=False), st.integers(0, 1 << 62))
def test_a_time_is_held_to_what_is_possible(unix_s: float, now_ns: int) -> None:
    at = timing.mono_ns(unix_s, 1_700_000_000_000_000_000, now_ns)
    assert max(0, now_ns - timing.MAX_AGE_NS) <= at <= now_ns


def test_a_time_is_converted() -> None:
    offset = 1_700_000_000_000_000_000
    assert timing.mono_ns(1_700_000_099.0, offset, 100_000_000_000) == 99_000_000_000
    assert timing.mono_ns(0.0, offset, 100_000_000_000) == 100_000_000_000
