"""What one would say without a critical path: by chance, by the oddest counter, by the event that became more frequent.

Each guesses causes of a slowed request, best first. Pure: samples and requests in, guesses out.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.demo.truth import Sent
from tests.faults.host.inferred import COUNTERS, cause_of_event
from tests.faults.host.sampler import GAUGES

RANDOM, COUNTER, EVENTS = "random", "largest z-score", "event counts"
NAMES = (RANDOM, COUNTER, EVENTS)

Guess = tuple[str, ...]


def by_chance(causes: Sequence[str], rng: random.Random, count: int) -> list[Guess]:
    """Guess: any of the causes."""
    listed = sorted(set(causes))
    return [tuple(rng.sample(listed, min(3, len(listed)))) for _ in range(count)]


def _best(scores: Iterable[tuple[float, str]]) -> Guess:
    out: list[str] = []
    for _, cause in sorted(scores, key=lambda s: (-s[0], s[1])):
        if cause and cause not in out:
            out.append(cause)
    return tuple(out[:3])


class Series:
    """Samples as rates per second (gauges as they are), one per interval between two of them."""

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """*samples* by time, their ``ns`` with them."""
        self.ends = [int(s["ns"]) for s in samples][1:]
        self.starts = [int(s["ns"]) for s in samples][:-1]
        self.names = [n for n in COUNTERS if samples and n in samples[0]]
        seconds = (np.array(self.ends) - np.array(self.starts)) / 1e9
        table = np.array([[float(s.get(n, np.nan)) for n in self.names] for s in samples]).reshape(
            len(samples), len(self.names)
        )
        self.rates = np.diff(table, axis=0) / np.maximum(seconds, 1e-3)[:, None]
        for i, name in enumerate(self.names):
            if name in GAUGES:
                self.rates[:, i] = table[1:, i]

    def within(self, start_ns: int, end_ns: int) -> slice:
        """Return the intervals that a stretch of time touches."""
        return slice(bisect_right(self.ends, start_ns), max(bisect_left(self.starts, end_ns), 0))


def by_counters(series: Series, healthy: Sequence[Sent], slowed: Sequence[Sent]) -> list[Guess]:
    """Guess: the counter with the largest robust z-score in the request's window against healthy windows."""
    if not len(series.rates):
        return [() for _ in slowed]
    usual = np.array([np.nanmean(w, axis=0) for s in healthy if len(w := _window(series, s))])
    if len(usual) < 2:
        return [() for _ in slowed]
    centre = np.nanmedian(usual, axis=0)
    spread = 1.4826 * np.nanmedian(np.abs(usual - centre), axis=0)
    # Most counters never move when all is well: then their own deviation, or one unit a second.
    spread = np.where(spread > 0, spread, np.maximum(np.nanstd(usual, axis=0), 1.0))
    guesses: list[Guess] = []
    for s in slowed:
        window = _window(series, s)
        if not len(window):
            guesses.append(())
            continue
        z = np.nan_to_num(np.abs(np.nanmean(window, axis=0) - centre) / spread)
        guesses.append(_best((float(v), COUNTERS[n]) for v, n in zip(z, series.names, strict=True) if v > 0))
    return guesses


def _window(series: Series, request: Sent) -> Any:
    return series.rates[series.within(request.start_ns, request.end_ns)]


COOCCUR_NS = 10_000_000_000


def by_events(
    times: Mapping[str, Any], healthy_until_ns: int, since_ns: int, slowed: Sequence[Sent]
) -> list[Guess]:
    """Guess: the kind of event with the largest relative increase in the 10 s before the request's end.

    Args:
        times: Sorted times of events in ns, by kind.
        healthy_until_ns: Begin of the first fault; what is usual comes from before.
        since_ns: When the agent began to watch.
        slowed: Whom to guess about.
    """
    usual: dict[str, float] = {}
    seconds = max((healthy_until_ns - since_ns) / COOCCUR_NS, 0.1)
    for kind, ns in times.items():
        usual[kind] = (np.searchsorted(ns, healthy_until_ns) - np.searchsorted(ns, since_ns)) / seconds
    guesses = []
    for s in slowed:
        scores = []
        for kind, ns in times.items():
            count = np.searchsorted(ns, s.end_ns) - np.searchsorted(ns, s.end_ns - COOCCUR_NS)
            scores.append((float((count + 1) / (usual[kind] + 1)), cause_of_event(kind)))
        guesses.append(_best(scores))
    return guesses


def event_times(recording: Any) -> dict[str, Any]:
    """Return the times of a recording's events by kind, sorted. *recording*: an open ``whyspan.recording.Reader``."""
    parts: dict[int, list[Any]] = {}
    for batch in recording.batches():
        for kind in np.unique(batch.events["kind"]):
            parts.setdefault(int(kind), []).append(batch.events["ts_ns"][batch.events["kind"] == kind])
    names = {kind: t.name for kind, t in recording.schema.by_kind.items()}
    return {names[k]: np.sort(np.concatenate(p)) for k, p in parts.items() if k in names}
