"""Whether two samples of requests differ, and by how much: permutation tests and bootstrap intervals, weighted. Pure.

Every request stands for ``weight`` requests: the store keeps all slow ones it can and few ordinary ones. The same input
gives the same output: the generators are seeded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The smallest p-value is 1 in so many.
PERMUTATIONS: Final = 2000
REPLICATES: Final = 1000
_SEED: Final = 20260101
_CELLS: Final = 4_000_000  # of a matrix at a time: 16 MB
_TAIL: Final = 2.5  # percent on either side of an interval


class Sample(NamedTuple):
    """Requests: a row of values each, and its weight."""

    values: Floats  # requests x columns
    weights: Floats


class Interval(NamedTuple):
    """An estimate and its 95% interval."""

    value: float
    low: float
    high: float


def means(sample: Sample) -> Floats:
    """Return the weighted mean of each column."""
    total = sample.weights.sum()
    return np.asarray(sample.weights @ sample.values / total)


def p_values(a: Sample, b: Sample, permutations: int = PERMUTATIONS) -> Floats:
    """Return for each column the p-value of equal means, corrected for the number of columns.

    Permutation test of the studentised difference of weighted means; corrected by the greatest statistic of all columns
    (single-step maxT), which holds the family-wise error and knows that the columns depend on each other.
    Source: Westfall and Young, Resampling-Based Multiple Testing, 1993, section 2.3; Chung and Romano,
    doi 10.1214/13-AOS1090, for the studentised statistic where variances differ.
    """
    values = np.vstack([a.values, b.values])
    weights = np.concatenate([a.weights, b.weights])
    count, columns = values.shape
    if not len(a.weights) or not len(b.weights) or not columns:
        return np.ones(columns)
    # Centred and scaled: single precision must do for a matrix of millions of cells.
    centre = weights @ values / weights.sum()
    spread = np.sqrt(weights @ (values - centre) ** 2 / weights.sum())
    scaled = (values - centre) / np.where(spread > 0, spread, 1.0)
    w = (weights / weights.mean())[:, None]
    parts = np.hstack([w, w * scaled, w * w, w * w * scaled, w * w * scaled * scaled]).astype(np.float32)
    whole = parts.sum(axis=0, dtype=np.float64)
    side = np.zeros((1, count), dtype=np.float32)
    side[0, len(a.weights) :] = 1.0
    seen = np.abs(_statistic(side @ parts, whole, columns))[0]
    random = np.random.default_rng(_SEED)
    above = np.zeros(columns)
    for rows in _portions(permutations, count):
        shuffled = random.permuted(np.broadcast_to(side, (rows, count)), axis=1)
        greatest = np.abs(_statistic(shuffled @ parts, whole, columns)).max(axis=1)
        above += (greatest[:, None] >= seen[None, :] - 1e-6).sum(axis=0)
    return np.asarray((above + 1) / (permutations + 1))


def _statistic(inside: NDArray[np.float32], whole: Floats, columns: int) -> Floats:
    """Return the studentised differences of means, from sums over one side and over both."""

    def moments(sums: Floats) -> tuple[Floats, Floats]:
        w, wx, w2, w2x, w2xx = np.split(sums, [1, 1 + columns, 2 + columns, 2 + 2 * columns], axis=1)
        total = np.maximum(w, 1e-12)
        mean = wx / total
        return mean, np.maximum(w2xx - 2 * mean * w2x + mean * mean * w2, 0.0) / (total * total)

    one = inside.astype(np.float64)
    mean_b, variance_b = moments(one)
    mean_a, variance_a = moments(whole - one)
    deviation = np.sqrt(variance_a + variance_b)
    known = deviation > 1e-9
    return np.asarray(np.where(known, (mean_b - mean_a) / np.where(known, deviation, 1.0), 0.0))


def differences(a: Sample, b: Sample, replicates: int = REPLICATES) -> list[Interval]:
    """Return for each column by how much the mean of *b* is above that of *a*. Percentiles of a bootstrap."""
    draws = [_means_drawn(s, replicates, seed) for seed, s in enumerate((a, b))]
    return _intervals(means(b) - means(a), draws[1] - draws[0])


def quantiles(sample: Sample, ratios: tuple[float, ...]) -> Floats:
    """Return weighted quantiles of the first column."""
    order = np.argsort(sample.values[:, 0], kind="stable")
    weights = sample.weights[order][None, :]
    return np.asarray(_quantiles(sample.values[order, 0], weights, ratios)[0])


def quantile_intervals(
    a: Sample, b: Sample, ratios: tuple[float, ...], replicates: int = REPLICATES
) -> list[tuple[Interval, Interval, Interval]]:
    """Return for each ratio the quantile of the first column in *a*, in *b*, and by how much the latter is above."""
    draws = []
    for seed, sample in enumerate((a, b)):
        order = np.argsort(sample.values[:, 0], kind="stable")
        values, weights = sample.values[order, 0], sample.weights[order]
        random = np.random.default_rng((_SEED, seed))
        drawn = [
            _quantiles(values, random.poisson(1.0, (rows, len(values))) * weights, ratios)
            for rows in _portions(replicates, len(values))
        ]
        draws.append(np.vstack(drawn))
    at = quantiles(a, ratios), quantiles(b, ratios)
    return list(
        zip(
            _intervals(at[0], draws[0]),
            _intervals(at[1], draws[1]),
            _intervals(at[1] - at[0], draws[1] - draws[0]),
            strict=True,
        )
    )


def _quantiles(ordered: Floats, weights: Floats, ratios: tuple[float, ...]) -> Floats:
    """Return the quantiles of values in order, for each row of weights."""
    heights = np.cumsum(weights, axis=1)
    out = np.empty((len(weights), len(ratios)))
    for row, height in enumerate(heights):
        at = np.searchsorted(height, np.asarray(ratios) * height[-1], side="left")
        out[row] = ordered[np.minimum(at, len(ordered) - 1)]
    return out


def _means_drawn(sample: Sample, replicates: int, seed: int) -> Floats:
    """Return weighted means of bootstrap replicates: each request is drawn a Poisson number of times."""
    random = np.random.default_rng((_SEED, seed))
    columns = np.hstack([sample.weights[:, None], sample.weights[:, None] * sample.values])
    parts = []
    for rows in _portions(replicates, len(sample.weights)):
        sums = random.poisson(1.0, (rows, len(sample.weights))).astype(np.float64) @ columns
        parts.append(sums[:, 1:] / np.maximum(sums[:, :1], 1e-12))
    return np.vstack(parts)


def _intervals(values: Floats, drawn: Floats) -> list[Interval]:
    low, high = np.percentile(drawn, (_TAIL, 100 - _TAIL), axis=0)
    return [Interval(*map(float, item)) for item in zip(values, low, high, strict=True)]


def _portions(rows: int, columns: int) -> list[int]:
    """Part *rows* so that none makes a matrix of more than `_CELLS`."""
    at_once = max(1, min(rows, _CELLS // max(columns, 1)))
    return [at_once] * (rows // at_once) + [rows % at_once] * bool(rows % at_once)
