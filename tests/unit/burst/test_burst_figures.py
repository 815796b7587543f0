"""The arithmetic of bursts: histograms, what one will cost, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.burst import cost, histogram, table
from whyspan.burst.errors import TooDearError
from whyspan.burst.report import Expected


@given(st.integers(0, 2**40))
def test_a_value_lies_below_the_upper_end_of_its_bucket_only(value: int) -> None:
    n = histogram.bucket_of(value)
    assert value < histogram.upper(n)
    assert n == 0 or value >= histogram.upper(n - 1)


@given(st.lists(st.integers(0, 2**38), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_bounded_within_a_factor_of_two(values: list[int], q: float) -> None:
    buckets = [0] * 40
    for value in values:
        buckets[histogram.bucket_of(value)] += 1
    bound = histogram.quantile(buckets, q)
    true = next(v for i, v in enumerate(sorted(values), 1) if i >= q * len(values))
    assert true < bound <= max(1, 2 * true)


def test_no_values_have_no_quantile() -> None:
    assert histogram.quantile([0] * 40, 0.5) == 0
    assert histogram.quantile([], 0.5) == 0


@given(st.lists(st.integers(0, 1000), max_size=40))
def test_bars(buckets: list[int]) -> None:
    text = histogram.bars(buckets)
    assert len(text) == max(0, min(len(buckets), 37) - 9)
    if text:
        assert (set(text) == {" "}) == (sum(buckets) == 0)
        assert not sum(buckets) or "█" in text


def test_what_lies_outside_the_bars_is_at_their_ends() -> None:
    buckets = [0] * 40
    buckets[3] = buckets[39] = 5
    assert histogram.bars(buckets) == "█" + " " * 26 + "█"


def load(calls: int, look_ns: int = 1_000, burst_ns: int = 4_000) -> cost.Load:
    return cost.Load().plus(calls, look_ns, burst_ns)


def test_the_look_is_taken_out_of_the_rate() -> None:
    # 20,000 calls in 0.1 s, of which 20 ms were the look's own: 80 ms of the thread's time.
    e = cost.expect({7: load(20_000), 8: load(100), 0: load(5_000)}, {7: "worker"}, 0.1, 4_000)
    assert (e.tid, e.thread, e.call_ns) == (7, "worker", 4_000)
    assert e.calls_per_s == pytest.approx(250_000)
    assert e.slowdown == pytest.approx(2.0)
    assert e.all_per_s == pytest.approx(250_000 + 100 / 0.0999)
    assert e.host_per_s == pytest.approx(50_000)


def test_a_look_that_took_all_the_time_leaves_a_bound() -> None:
    e = cost.expect({7: load(200_000)}, {}, 0.1, 4_000)
    assert e.slowdown == pytest.approx(1 + 0.8 / 0.005)


def test_the_dearest_thread_counts_not_the_busiest() -> None:
    e = cost.expect({7: load(1_000, burst_ns=3_000), 8: load(900, burst_ns=8_000)}, {}, 0.1, 4_000)
    assert e.tid == 8


def test_nobody_called() -> None:
    e = cost.expect({0: load(31)}, {}, 0.1, 4_000)
    assert (e.tid, e.slowdown, e.call_ns) == (0, 1.0, 4_000)
    assert "no malloc call in 100 ms" in cost.describe(e, "malloc", 5)


def test_the_bound() -> None:
    just, over = Expected(slowdown=cost.MAX_SLOWDOWN), Expected(slowdown=cost.MAX_SLOWDOWN + 0.01)
    cost.check(just, force=False)
    cost.check(over, force=True)
    with pytest.raises(TooDearError, match="--force"):
        cost.check(over, force=False)


def test_the_cost_is_told_in_numbers() -> None:
    e = Expected(
        thread="loop",
        tid=9,
        calls_per_s=12_345,
        all_per_s=20_000,
        call_ns=4_000,
        slowdown=1.05,
        host_per_s=1_000,
    )
    text = cost.describe(e, "malloc", 5)
    assert "thread 9 (loop) makes 12,345 malloc calls/s" in text
    assert "4.0 µs more" in text
    assert "1.05 times as long for 5 s" in text
    assert "other processes" not in text
    e.host_call_ns = 400
    assert "1,000 calls/s, which cost about 400 ns more each (0.04% of a CPU)" in cost.describe(
        e, "system", 5
    )


@pytest.mark.parametrize(
    ("bytes_", "text"), [(0, "0 B"), (128, "128 B"), (4096, "4 KiB"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_amounts(bytes_: int, text: str) -> None:
    assert table.amount(bytes_) == text


@pytest.mark.parametrize(
    ("ns", "text"), [(512, "512 ns"), (4096, "4.1 µs"), (1 << 20, "1.05 ms"), (1 << 32, "4.29 s")]
)
def test_durations(ns: int, text: str) -> None:
    assert table.duration(ns) == text
