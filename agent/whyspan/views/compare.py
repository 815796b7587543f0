"""Two sets of requests compared: latency, errors and the time by cause, each with its uncertainty. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Final, NamedTuple

import numpy as np

from whyspan.latency import ttft_ms
from whyspan.outcome import error_type
from whyspan.views import resample, weighing
from whyspan.views.comparison import CauseChange, CompareView, Gate, Metric, Side
from whyspan.views.resample import Interval, Sample
from whyspan.views.select import Measured, Selector
from whyspan.views.weighing import Totals

#: Answered requests that the store must have on either side.
MIN_STORED: Final = 30
#: And that they stand for: with fewer, no order statistic bounds P99 from above (1 - 0.99**n >= 0.95).
MIN_FOR_P99: Final = 299
#: From a p-value on below which a cause got better or worse.
ALPHA: Final = 0.05
_CAUSES: Final = 60
_OTHER: Final = "(others)"
_RATIOS: Final = (0.5, 0.9, 0.99)
_ENDED: Final = frozenset({"ok", "error", "reset", "killed"})
_Z: Final = 1.959964  # of a 95% interval


class Chosen(NamedTuple):
    """What a selector found: when each request began, itself, and the totals of the services, None if not known."""

    selector: Selector
    starts_unix_ns: Sequence[int]
    requests: Sequence[Measured]
    totals: Mapping[str, Totals] | None


def compare(a: Chosen, b: Chosen, p99_ms: float = 15.0, errors: float = 0.008) -> CompareView:
    """Compare *b* with *a*. Limits of the gates: by how much P99 and the ratio of errors may be higher."""
    sides = [_ended(a), _ended(b)]
    known = all(s.totals is not None for s in sides)
    weights = [
        weighing.weights(s.requests, s.totals or {}) if known else np.ones(len(s.requests)) for s in sides
    ]
    answered = [np.array([not error_type(m.request) for m in s.requests], dtype=bool) for s in sides]
    few = _too_few(answered, weights)
    metrics: list[Metric] = []
    causes: list[CauseChange] = []
    gates: list[Gate] = []
    if all(len(w) for w in weights):
        metrics.append(_errors(answered, weights))
    if all(mask.sum() >= MIN_STORED for mask in answered):
        kept = [[m for m, is_in in zip(s.requests, mask, strict=True) if is_in]
                for s, mask in zip(sides, answered, strict=True)]  # fmt: skip
        kept_weights = [w[mask] for w, mask in zip(weights, answered, strict=True)]
        metrics = [*_latencies(kept, kept_weights), *metrics]
        causes = _causes(kept, kept_weights)
    if not few:
        by_key = {m.key: m for m in metrics}
        gates = [_gate(by_key["latency_p99"], p99_ms), _gate(by_key["errors"], errors)]
    return CompareView(
        a=_side(sides[0], weights[0]),
        b=_side(sides[1], weights[1]),
        weighted=known,
        too_few=few,
        metrics=metrics,
        causes=causes,
        gates=gates,
    )


def shared(a: Chosen, b: Chosen) -> int:
    """Return how many requests are on both sides: a comparison of a thing with itself says nothing."""

    def keys(side: Chosen) -> set[tuple[int, str, int, int]]:
        return {
            (start, m.request.trace_id, m.request.cookie, m.request.seq)
            for start, m in zip(side.starts_unix_ns, side.requests, strict=True)
        }

    return len(keys(a) & keys(b))


def _ended(side: Chosen) -> Chosen:
    kept = [
        (at, m)
        for at, m in zip(side.starts_unix_ns, side.requests, strict=True)
        if m.request.outcome in _ENDED
    ]
    return side._replace(starts_unix_ns=[at for at, _ in kept], requests=[m for _, m in kept])


def _too_few(answered: list[np.ndarray], weights: list[resample.Floats]) -> str:
    for name, mask, w in zip("AB", answered, weights, strict=True):
        if mask.sum() < MIN_STORED:
            return f"{name} has {mask.sum()} answered requests in the store, {MIN_STORED} are needed"
        if w[mask].sum() < MIN_FOR_P99:
            return f"{name} has {w[mask].sum():.0f} answered requests, {MIN_FOR_P99} are needed for P99"
    return ""


def _latencies(kept: list[list[Measured]], weights: list[resample.Floats]) -> list[Metric]:
    out = []
    for key, label in (("latency", "latency"), ("ttft", "first byte")):
        samples = []
        for requests, w in zip(kept, weights, strict=True):
            values = [m.wall_ns / 1e6 if key == "latency" else ttft_ms(m.request) for m in requests]
            column = np.array(values, dtype=np.float64)
            samples.append(Sample(column[column >= 0, None], w[column >= 0]))
        if any(len(s.weights) < MIN_STORED for s in samples):
            continue
        a, b = samples
        for ratio, (at_a, at_b, change) in zip(
            _RATIOS, resample.quantile_intervals(a, b, _RATIOS), strict=True
        ):
            name = f"P{ratio * 100:g}"
            out.append(
                Metric(
                    key=f"{key}_{name.lower()}",
                    label=f"{label} {name}",
                    unit="ms",
                    a=at_a,
                    b=at_b,
                    change=change,
                )
            )
    return out


def _causes(kept: list[list[Measured]], weights: list[resample.Floats]) -> list[CauseChange]:
    spent: defaultdict[str, float] = defaultdict(float)
    for requests, w in zip(kept, weights, strict=True):
        for m, weight in zip(requests, w / w.sum(), strict=True):
            for cause, ms in m.causes.items():
                spent[cause] += ms * float(weight)
    names = sorted(spent, key=lambda name: (-spent[name], name))[:_CAUSES]
    places = {name: i for i, name in enumerate(names)}
    rest = [_OTHER] if len(spent) > len(names) else []
    samples = []
    for requests, w in zip(kept, weights, strict=True):
        values = np.zeros((len(requests), len(names) + len(rest)))
        for row, m in enumerate(requests):
            for cause, ms in m.causes.items():
                values[row, places.get(cause, len(names))] += ms
        samples.append(Sample(values, w))
    a, b = samples
    out = [
        CauseChange(
            cause=name,
            a_ms=float(a_ms),
            b_ms=float(b_ms),
            change=change,
            p=float(p),
            state=("worse" if change.value > 0 else "better") if p < ALPHA else "same",
        )
        for name, a_ms, b_ms, change, p in zip(
            [*names, *rest],
            resample.means(a),
            resample.means(b),
            resample.differences(a, b),
            resample.p_values(a, b),
            strict=True,
        )
    ]
    return sorted(out, key=lambda c: (-abs(c.change.value), c.cause))


def _errors(answered: list[np.ndarray], weights: list[resample.Floats]) -> Metric:
    """Compare ratios of errors. Source of the difference's interval: Newcombe's method 10, doi
    10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I.
    """
    a, b = (_wilson(mask, w) for mask, w in zip(answered, weights, strict=True))
    value = b.value - a.value
    low = value - sqrt((b.value - b.low) ** 2 + (a.high - a.value) ** 2)
    high = value + sqrt((b.high - b.value) ** 2 + (a.value - a.low) ** 2)
    return Metric(key="errors", label="errors", unit="ratio", a=a, b=b, change=Interval(value, low, high))


def _wilson(answered: np.ndarray, weights: resample.Floats) -> Interval:
    total, bad = float(weights.sum()), float(weights[~answered].sum())
    # A failure that stands for several says no more than one: so many requests there are in effect.
    n = total / max(float(weights[~answered].mean()) if bad else 1.0, 1.0)
    p = bad / total
    middle = (p + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
    return Interval(p, max(min(middle - half, p), 0.0), min(max(middle + half, p), 1.0))


def _gate(metric: Metric, limit: float) -> Gate:
    change = metric.change
    worse = change.value > limit and change.low > 0
    state = "worse" if worse else "ok" if change.high <= limit else "unclear"
    return Gate(key=metric.key, label=metric.label, unit=metric.unit, limit=limit, change=change, state=state)


def _side(side: Chosen, weights: resample.Floats) -> Side:
    return Side(
        selector=side.selector.text,
        stored=len(side.requests),
        stands_for=float(weights.sum()),
        slow=sum(m.slow for m in side.requests),
        failed=sum(bool(error_type(m.request)) for m in side.requests),
        first_unix_ms=min(side.starts_unix_ns, default=0) / 1e6,
        last_unix_ms=max(side.starts_unix_ns, default=0) / 1e6,
    )
