"""Histograms by powers of two: bucket n has what is at least 2^(n-1) and less than 2^n, bucket 0 what is 0."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = " ▁▂▃▄▅▆▇█"


def bucket_of(value: int) -> int:
    """Return the bucket that a value falls into."""
    return max(value, 0).bit_length()


def upper(bucket: int) -> int:
    """Return the least value above a bucket."""
    return 1 << bucket


def quantile(buckets: Sequence[int], q: float) -> int:
    """Return a bound: so large a part *q* of the values is below it. 0 for no values.

    The true quantile is at least half of it, but for the last bucket, which has no upper end.
    """
    total = sum(buckets)
    if not total:
        return 0
    seen = 0
    for n, count in enumerate(buckets):
        seen += count
        if seen >= q * total and seen:
            return upper(n)
    return upper(len(buckets) - 1)


def merge(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Add two histograms up."""
    return [(a[i] if i < len(a) else 0) + (b[i] if i < len(b) else 0) for i in range(max(len(a), len(b)))]


def bars(buckets: Sequence[int], first: int = 9, last: int = 36) -> str:
    """Return one character per bucket, from *first* (512 ns) to *last* (34 s), with what lies outside at the ends."""
    inner = list(buckets[first : last + 1])
    if not inner:
        return ""
    inner[0] += sum(buckets[:first])
    inner[-1] += sum(buckets[last + 1 :])
    top = max(inner)
    return "".join(_BARS[-(-n * (len(_BARS) - 1) // top)] if top else _BARS[0] for n in inner)
