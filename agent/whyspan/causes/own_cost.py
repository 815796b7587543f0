"""What our own probes cost a request: their hits on the path's threads, by their measured run time."""

from __future__ import annotations

from typing import Final

import numpy as np

from whyspan.causes.context import MS, Context
from whyspan.critical_path import Path
from whyspan.timeline import RUNNING

#: Said from this share of the request's time on.
MIN_SHARE: Final = 0.01


def own_ns(path: Path, ctx: Context) -> dict[str, float]:
    """Return the time per probe, ns: records of the path's threads while they ran on it, by what a hit costs.

    A hit that records nothing (an unwatched thread, a filter) is not seen here and costs less.
    """
    costs = ctx.facts.observers.costs()
    if not costs:
        return {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for s in path.segments:
        if s.state == RUNNING:
            spans.setdefault(s.tid, []).append((s.start_ns, s.end_ns))
    counts: dict[int, int] = {}
    for tid, parts in spans.items():
        rows = ctx.timelines.rows(tid)
        edges = np.array(parts, np.uint64)
        # A thread that leaves the CPU does so at a segment's end: that hit is the path's.
        first = rows["ts_ns"].searchsorted(edges[:, 0], "left")
        last = rows["ts_ns"].searchsorted(edges[:, 1], "right")
        kinds = np.concatenate([rows["kind"][a:b] for a, b in zip(first, last, strict=True)])
        for kind, n in zip(*(x.tolist() for x in np.unique(kinds, return_counts=True)), strict=True):
            counts[kind] = counts.get(kind, 0) + n
    schema = ctx.timelines.schema
    out: dict[str, float] = {}
    for cost in costs:
        hits = sum(counts.get(schema.kind(name), 0) for name in cost.events)
        if hits:
            out[cost.probe] = hits * cost.ns_per_hit
    return out


def evidence(path: Path, ctx: Context) -> list[str]:
    """Return one line when our own probes cost more than one hundredth of the request's time; else nothing."""
    wall = path.end_ns - path.start_ns
    found = own_ns(path, ctx)
    total = sum(found.values())
    if wall <= 0 or total <= MIN_SHARE * wall:
        return []
    most = max(found, key=lambda name: found[name])
    return [
        f"whyspan's own probes took about {total / MS:.1f} ms of it ({total / wall:.1%}), "
        f"most of it {most} ({found[most] / MS:.1f} ms)"
    ]
