"""Counts every request that ended, explained or not: histograms, objectives met and missed, how even tokens came. Pure.

Costs microseconds per request; bounded by the number of series, whatever a server answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from whyspan.latency import latency_ms, ttft_ms
from whyspan.lru import Lru
from whyspan.model import Request
from whyspan.outcome import error_type

if TYPE_CHECKING:  # numpy stays out of the exporter, which knows the buckets from here
    from whyspan.baseline import Objectives

#: Upper bounds of the histograms' buckets, in s; another bucket is above them.
BOUNDS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5),
    *(5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
#: The histograms: the whole request, its first byte, the mean time between chunks after it.
NAMES: Final = ("duration", "ttft", "per_token")
#: Requests that only ask how things are: health checks, scrapes, lists of models.
ASK: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_SERIES: Final = 64
_MAX_CODES: Final = 200
_MAX_SERVICES: Final = 50
_SLOTS: Final = 12
_SLOT_NS: Final = 5_000_000_000

Key = tuple[str, str, str]  # name, service, label


class Series(NamedTuple):
    """What a histogram is of; ``overflow``: of everything for which there was no room."""

    service: str
    model: str = ""
    error: str = ""  # error.type
    overflow: bool = False


OVERFLOW: Final = Series("", overflow=True)


def bucket(seconds: float) -> int:
    """Return the index of the bucket that a value falls into: a bound belongs to the bucket below it."""
    return bisect_left(BOUNDS_S, seconds)


def per_chunk_s(request: Request) -> float:
    """Return the mean time between the chunks of an answer; -1 when it came in one piece."""
    if request.chunks < 2 or not 0 < request.first_ns < request.end_ns:
        return -1.0
    return (request.end_ns - request.first_ns) / 1e9 / (request.chunks - 1)


class _Histograms:
    """The three histograms of a series, as counts per bucket and a sum in s."""

    def __init__(self) -> None:
        self.counts = [[0] * (len(BOUNDS_S) + 1) for _ in NAMES]
        self.sums = [0.0 for _ in NAMES]

    def add(self, which: int, seconds: float) -> None:
        self.counts[which][bisect_left(BOUNDS_S, seconds)] += 1
        self.sums[which] += seconds


class _Even:
    """Weighted moments of the time between chunks, in slots of 5 s that together cover the last minute."""

    def __init__(self) -> None:
        self._slots: dict[int, list[float]] = {}  # by number: requests, weight, sum, sum of squares

    def add(self, at_ns: int, gaps_s: Sequence[float], weight: int) -> None:
        """Take the gaps of a request, each *weight* times."""
        number = at_ns // _SLOT_NS
        slot = self._slots.get(number)
        if slot is None:
            self._forget(number)
            slot = self._slots[number] = [0.0, 0.0, 0.0, 0.0]
        slot[0] += 1
        slot[1] += weight * len(gaps_s)
        slot[2] += weight * sum(gaps_s)
        slot[3] += weight * sum(gap * gap for gap in gaps_s)

    def _forget(self, number: int) -> None:
        self._slots = {n: s for n, s in self._slots.items() if n > number - _SLOTS}

    def figures(self, now_ns: int) -> dict[str, float] | None:
        """Return mean and deviation over the last minute; None with fewer than two requests."""
        self._forget(now_ns // _SLOT_NS)
        requests, weight, total, squares = (sum(s[i] for s in self._slots.values()) for i in range(4))
        if requests < 2 or not total:
            return None
        mean = total / weight
        deviation = sqrt(max(squares / weight - mean * mean, 0.0))
        return {"mean_s": mean, "stddev_s": deviation, "jitter": deviation / mean}


class Tally:
    """``counts`` gets ``request_codes`` (label: outcome/status) and ``slo`` (label: objective/result), by service."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.counts: Counter[Key] = Counter()
        self._codes = 0
        self._series: dict[Series, _Histograms] = {}
        self._even: Lru[str, _Even] = Lru(_MAX_SERVICES)

    def add(self, request: Request, objectives: Objectives, model: str, gaps_s: Sequence[float] = ()) -> None:
        """Count a request that ended.

        Args:
            request: Which has an outcome.
            objectives: Those of its service.
            model: The one that its engine serves, empty when that is not known.
            gaps_s: The times between its tokens, as its engine tells; without them the mean time between the chunks
                of its answer stands for each of them.
        """
        self._count_code(request)
        if request.outcome == "lost" or request.method in ASK:
            return
        error = error_type(request)
        latency, ttft, chunk = latency_ms(request), ttft_ms(request), per_chunk_s(request)
        service = request.service
        self.counts["slo", service, "success/bad" if error else "success/good"] += 1
        for name, value, limit in (
            ("e2e", latency, objectives.e2e_ms),
            ("ttft", ttft, objectives.ttft_ms),
            ("inter_token", chunk * 1e3, getattr(objectives, "inter_token_ms", 0.0)),
        ):
            if limit and value >= 0 and (value > limit or not error):  # failing fast is not being fast
                self.counts["slo", service, f"{name}/{'bad' if value > limit else 'good'}"] += 1
        mine = self._of(Series(service, model, error))
        mine.add(0, latency / 1e3)
        if request.first_ns and ttft >= 0:
            mine.add(1, ttft / 1e3)
        if chunk >= 0:
            mine.add(2, chunk)
        if not error and (gaps_s or chunk >= 0):
            even = self._even.get(service)
            if even is None:
                even = _Even()
                self._even.put(service, even)
            even.add(request.end_ns, gaps_s or (chunk,), 1 if gaps_s else request.chunks - 1)

    def _count_code(self, request: Request) -> None:
        code = str(request.status) if 100 <= request.status <= 599 else "0"
        key = "request_codes", request.service, f"{request.outcome}/{code}"
        if key not in self.counts:
            self._codes += 1
            if self._codes > _MAX_CODES:  # a server may answer with whatever it likes
                key = "request_codes", "", "other"
        self.counts[key] += 1

    def _of(self, series: Series) -> _Histograms:
        found = self._series.get(series)
        if found is None:
            if len(self._series) >= _MAX_SERIES:
                series = OVERFLOW
            found = self._series.setdefault(series, _Histograms())
        return found

    def state(self, now_ns: int) -> dict[str, Any]:
        """Return the histograms, totals since the start, and how even the last minute's tokens came; JSON-like."""
        figures = {service: even.figures(now_ns) for service, even in self._even.items()}
        return {
            "latencies": [
                [s.service, s.model, s.error, s.overflow, [list(c) for c in h.counts], list(h.sums)]
                for s, h in self._series.items()
            ],
            "inter_token": {service: f for service, f in figures.items() if f is not None},
        }
