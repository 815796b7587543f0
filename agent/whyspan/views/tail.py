"""The distribution of latency over time, and which causes its slow part has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from whyspan_exporters.filters import Filter
from whyspan_exporters.history import BUCKETS
from whyspan_exporters.reader import Reader

from whyspan.model import UNKNOWN
from whyspan.objectives import quantile_ms
from whyspan.tally import BOUNDS_S
from whyspan.views.shapes import MAX_CAUSES, OTHER, Bin, TailView
from whyspan.views.steps import steps

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_BOUNDS_MS: Final = tuple(bound * 1e3 for bound in BOUNDS_S)


def view(  # noqa: PLR0917
    reader: Reader,
    service: str = "",
    since_unix_ns: int = 0,
    until_unix_ns: int = 0,
    step_ns: int = 0,
    now_unix_ns: int = 0,
) -> TailView:
    """Return the tail of a service, or of all.

    Args:
        reader: The store.
        service: Its name; empty: all.
        since_unix_ns: The beginning; 0: an hour before the end.
        until_unix_ns: The end; 0: now.
        step_ns: How long a step is; 0 chooses.
        now_unix_ns: The wall clock.

    Raises:
        StoreError: The store cannot be read.
    """
    span = steps(since_unix_ns, until_unix_ns, now_unix_ns, step_ns)
    wanted = Filter(service=service, since_unix_ns=span.since_unix_ns, until_unix_ns=span.until_unix_ns)
    counted = reader.history.requests(span.since_unix_ns, span.until_unix_ns, span.step_ns, service)
    by_step = reader.requests.by_step(wanted, span.step_ns)
    buckets = reader.requests.by_latency(wanted, [round(bound * 1e9) for bound in BOUNDS_S])
    causes = _greatest((cause, ms) for _, cause, _, ms in by_step)
    excess = {cause: [0.0] * span.number for cause in causes}
    requests = {cause: [0] * span.number for cause in causes}
    for step, cause, n, ms in by_step:
        shown = cause if cause in excess else OTHER
        excess[shown][step] += ms
        requests[shown][step] += n
    total = [0] * BUCKETS
    for one in counted.values():
        total = [a + b for a, b in zip(total, one.latency, strict=True)]
    slow, failed = reader.requests.totals(wanted)
    first = reader.history.first_unix_ns()
    return TailView(
        services=_services(reader, span.since_unix_ns, span.until_unix_ns),
        service=service,
        step_ms=span.step_ns / 1e6,
        times_unix_ms=span.times_unix_ms,
        quantiles=_quantiles([counted[i].latency if i in counted else () for i in range(span.number)]),
        ttft_quantiles=_quantiles([counted[i].ttft if i in counted else () for i in range(span.number)]),
        counts=[counted[i].requests if i in counted else 0 for i in range(span.number)],
        by_cause=excess,
        by_cause_requests=requests,
        histogram=_bins(total, buckets, causes),
        requests=max(sum(one.requests for one in counted.values()), slow, failed),
        slow=slow,
        failed=max(sum(one.failed for one in counted.values()), failed),
        partial=first is None or first > span.since_unix_ns + span.step_ns,
    )


def _quantiles(histograms: Sequence[Sequence[int]]) -> dict[str, list[float | None]]:
    return {name: [quantile_ms(counts, q) for counts in histograms] for name, q in _QUANTILES.items()}


def _greatest(found: Iterable[tuple[str, float]]) -> list[str]:
    """Return the causes with a series of their own, greatest first, then what is behind them, then the unknown."""
    total: dict[str, float] = {}
    for cause, ms in found:
        total[cause] = total.get(cause, 0.0) + ms
    known = sorted((c for c in total if c != UNKNOWN), key=lambda c: (-total[c], c))
    out = known[:MAX_CAUSES]
    if len(known) > MAX_CAUSES:
        out.append(OTHER)
    return [*out, UNKNOWN] if UNKNOWN in total else out


def _bins(total: Sequence[int], found: Iterable[tuple[int, str, int]], causes: Sequence[str]) -> list[Bin]:
    slow: list[dict[str, int]] = [{} for _ in range(BUCKETS)]
    for bucket, cause, n in found:
        shown = cause if cause in causes else OTHER
        slow[bucket][shown] = slow[bucket].get(shown, 0) + n
    return [
        Bin(
            lower_ms=_BOUNDS_MS[i - 1] if i else 0.0,
            upper_ms=_BOUNDS_MS[i] if i < len(_BOUNDS_MS) else None,
            requests=max(total[i], sum(slow[i].values())),  # a store may know more findings than intervals
            slow_by_cause=slow[i],
        )
        for i in range(BUCKETS)
    ]


def _services(reader: Reader, since_unix_ns: int, until_unix_ns: int) -> list[str]:
    counted = reader.history.services(since_unix_ns, until_unix_ns)
    return [*counted, *(s for s in reader.requests.services(since_unix_ns) if s and s not in counted)]
