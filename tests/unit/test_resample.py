"""Permutation tests and bootstrap intervals: right where the answer is known, quiet where there is nothing."""

from __future__ import annotations

import numpy as np
from whyspan.views import resample
from whyspan.views.resample import Sample


def sample(seed: int, count: int, shift: float = 0.0, columns: int = 5) -> Sample:
    """Return requests whose columns are like causes: most are 0, some are heavy. Column 0 is shifted."""
    random = np.random.default_rng(seed)
    values = random.exponential(40.0, (count, columns)) * (random.random((count, columns)) < 0.2)
    values[:, 0] += shift
    return Sample(values, np.ones(count))


def test_a_shift_is_found_and_nothing_else() -> None:
    a, b = sample(1, 400), sample(2, 300, shift=12.0)
    p = resample.p_values(a, b, 1000)
    assert p[0] < 0.002
    assert (p[1:] > 0.05).all()
    change = resample.differences(a, b)[0]
    assert change.low < 12.0 < change.high
    assert change.low > 0


def test_what_is_equal_is_seldom_called_different() -> None:
    """The family-wise error of 5%: among 40 pairs of nothing, with 5 columns each, 2 are expected."""
    least = [resample.p_values(sample(2 * n, 120), sample(2 * n + 1, 90), 200).min() for n in range(40)]
    assert sum(p < 0.05 for p in least) <= 6  # P(more) < 0.01 for 40 draws of 5%
    assert sum(p < 0.5 for p in least) >= 10  # nor is it deaf


def test_intervals_contain_the_truth() -> None:
    """Of 40 intervals at 95% so many miss at most; the mean of the columns is 8."""
    missed = 0
    for n in range(40):
        a, b = sample(100 + n, 150), sample(200 + n, 120, shift=5.0)
        change = resample.differences(a, b, 400)[0]
        missed += not change.low <= 5.0 <= change.high
    assert missed <= 6


def test_weights_count_as_copies() -> None:
    plain = sample(5, 60)
    weights = np.random.default_rng(6).integers(1, 5, 60)
    copied = Sample(np.repeat(plain.values, weights, axis=0), np.ones(int(weights.sum())))
    weighted = Sample(plain.values, weights.astype(np.float64))
    assert np.allclose(resample.means(weighted), resample.means(copied))
    ratios = (0.5, 0.9, 0.99)
    assert np.array_equal(resample.quantiles(weighted, ratios), resample.quantiles(copied, ratios))


def test_quantiles_are_order_statistics() -> None:
    values = np.arange(1.0, 101.0)[::-1, None]
    ratios = (0.0, 0.5, 0.9, 0.99, 1.0)
    found = resample.quantiles(Sample(values, np.ones(100)), ratios)
    assert found.tolist() == [1, 50, 90, 99, 100]


def test_quantile_intervals_hold_their_estimates() -> None:
    a, b = sample(7, 500), sample(8, 500, shift=20.0)
    for at_a, at_b, change in resample.quantile_intervals(a, b, (0.5, 0.9, 0.99)):
        for found in (at_a, at_b, change):
            assert found.low <= found.value <= found.high
        assert change.value == at_b.value - at_a.value
        assert change.low <= 20.0 <= change.high


def test_the_same_again() -> None:
    a, b = sample(1, 50), sample(2, 50)
    assert np.array_equal(resample.p_values(a, b, 100), resample.p_values(a, b, 100))
    assert resample.differences(a, b, 100) == resample.differences(a, b, 100)


def test_nothing_varies_or_nothing_is_there() -> None:
    same = Sample(np.full((40, 2), 3.0), np.ones(40))
    assert resample.p_values(same, same, 100).tolist() == [1, 1]
    none = Sample(np.empty((0, 2)), np.empty(0))
    assert resample.p_values(same, none).tolist() == [1, 1]


def test_many_requests_come_in_portions() -> None:
    assert sum(resample._portions(5000, 10_000)) == 5000
    assert max(resample._portions(5000, 10_000)) * 10_000 <= resample._CELLS
    assert resample._portions(3, 0) == [3]
