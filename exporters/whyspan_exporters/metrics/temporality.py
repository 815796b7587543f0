"""Cumulative or delta: whether a point counts since the start, or since the export before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from whyspan.text import clean

from whyspan_exporters.metrics.instrument import Buckets, Point
from whyspan_exporters.metrics.snapshot import Family, Snapshot, key_of

ENV: Final = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
#: By preference, the kinds whose points are deltas. Specification, OTLP metrics exporter: lowmemory leaves observed
#: counters, as ours are, cumulative.
DELTAS: Final[dict[str, frozenset[str]]] = {
    "cumulative": frozenset(),
    "delta": frozenset({"counter", "histogram"}),
    "lowmemory": frozenset({"histogram"}),
}


def preference(configured: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the preference of the configuration, else the environment's; and what is wrong with the latter, or ""."""
    if configured:
        return configured, ""
    text = env.get(ENV, "").strip().lower() or "cumulative"
    if text in DELTAS:
        return text, ""
    return "cumulative", f"{ENV} {clean(text, 40)!r} is not one of {', '.join(DELTAS)}; cumulative used"


class Deltas:
    """Turns snapshots into what changed since the one before."""

    def __init__(self, kinds: frozenset[str], started_unix_ns: int) -> None:
        """*kinds* become deltas. What was counted before *started_unix_ns* others have sent: it is left out."""
        self._kinds, self._started_unix_ns = kinds, started_unix_ns
        self._last: dict[tuple[str, object], float | Buckets] = {}
        self._last_unix_ns = 0

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Return *snapshot* with the points of some kinds as differences; those without any change are left out."""
        if not self._kinds:
            return snapshot
        families = [self._family(f) if f.instrument.kind in self._kinds else f for f in snapshot.families]
        self._last_unix_ns = snapshot.unix_ns
        return snapshot._replace(families=[f for f in families if f.points])

    def _family(self, family: Family) -> Family:
        first = not self._last_unix_ns
        known = first and family.since_unix_ns < self._started_unix_ns
        points = []
        for p in family.points:
            key = family.instrument.name, key_of(p.labels)
            value = _difference(p.value, self._last.get(key))
            self._last[key] = p.value
            if not known and (any(value.counts) if isinstance(value, Buckets) else value):
                points.append(Point(value, p.labels, p.exemplars))
        since = self._last_unix_ns or max(family.since_unix_ns, self._started_unix_ns)
        return family._replace(points=points, since_unix_ns=since, delta=True)


def _difference(now: float | Buckets, before: float | Buckets | None) -> float | Buckets:
    """What was added; all of it where the count began anew."""
    if isinstance(now, Buckets):
        if not isinstance(before, Buckets) or any(
            a < b for a, b in zip(now.counts, before.counts, strict=True)
        ):
            return now
        counts = tuple(a - b for a, b in zip(now.counts, before.counts, strict=True))
        return Buckets(counts, max(now.total - before.total, 0.0))
    if before is None or isinstance(before, Buckets) or now < before:
        return now
    return now - before
