"""Objectives that a service can keep, from what was observed of it. Pure.

Histograms of all requests say into which bucket a quantile falls; the requests stored, which are a sample with all slow
ones in it, say where in the bucket. Neither alone would do: buckets are coarse, and the sample has too many slow ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from whyspan.tally import BOUNDS_S, bucket

#: Names of keys in ``[slo]``, in the order of `whyspan.tally.NAMES`.
KEYS: Final = ("e2e_ms", "ttft_ms", "inter_token_ms")
#: So many requests beyond the quantile make it more than chance.
BEYOND: Final = 10
#: Success rates that one can promise, best first.
RATES: Final = (0.9999, 0.9995, 0.999, 0.995, 0.99, 0.95, 0.9)


class Latency(NamedTuple):
    """What one objective of one service could be. ``enough``: there were requests enough to say so."""

    key: str
    requests: int
    enough: bool
    observed_ms: float
    suggested_ms: float


def latency(
    key: str, counts: Sequence[int], stored_s: Iterable[float], quantile: float, headroom: float
) -> Latency:
    """Suggest an objective.

    Args:
        key: One of `KEYS`.
        counts: All requests, per bucket of `BOUNDS_S` and above it; not all 0.
        stored_s: Values of the requests stored, in any order, in s.
        quantile: Of requests that are to meet it, below 1.
        headroom: How many times the observed value, so that an ordinary day keeps it.
    """
    total = sum(counts)
    observed_s = quantile_s(counts, stored_s, quantile)
    return Latency(
        key,
        total,
        total * (1 - quantile) >= BEYOND - 1e-9,
        observed_s * 1e3,
        round_up(observed_s * 1e3 * headroom),
    )


def quantile_s(counts: Sequence[int], stored_s: Iterable[float], quantile: float) -> float:
    """Return a quantile in s: exact as to the bucket, and within it as the stored values or, without any, evenly."""
    rank = max(math.ceil(quantile * sum(counts)), 1)
    below = at = 0
    while below + counts[at] < rank:
        below += counts[at]
        at += 1
    low = BOUNDS_S[at - 1] if at else 0.0
    high = BOUNDS_S[at] if at < len(BOUNDS_S) else math.inf
    share = (rank - below) / counts[at]  # of the bucket, up to and with this rank
    values = sorted(s for s in stored_s if bucket(s) == at)
    if values:
        return values[min(math.ceil(share * len(values)), len(values)) - 1]
    return low if math.isinf(high) else low + share * (high - low)


def quantile_ms(counts: Sequence[int], quantile: float) -> float | None:
    """Return a quantile of a histogram of `BOUNDS_S` alone, in ms; None when it is empty.

    Above all bounds it is the last of them, which it is beyond.
    """
    return quantile_s(counts, (), quantile) * 1e3 if any(counts) else None


def round_up(ms: float) -> float:
    """Return the next figure of two digits: 123.4 is 130, 0.0123 is 0.013."""
    if ms <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(ms)) - 1)
    # 130.00000000000003 is 130: what a multiplication adds must not cost a step.
    return float(f"{math.ceil(ms / unit - 1e-9) * unit:.12g}")


def success(good: int, bad: int) -> float:
    """Return the best of `RATES` that was kept; 0.0 when none was."""
    total = good + bad
    return next((rate for rate in RATES if total and good / total >= rate), 0.0)
