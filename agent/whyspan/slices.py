"""Paths in pieces: joining the slices of a long request, and keeping a path's length bounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from whyspan.causes import Classified
from whyspan.critical_path import Path
from whyspan.model import Segment

#: A finding travels as one message; a ten-minute stream would have 70,000 segments.
MAX_SEGMENTS = 2000
_FIRST_THRESHOLD_NS = 10_000


def join(parts: Sequence[Classified]) -> Classified:
    """Join the classified slices of one request, which follow each other without a gap."""
    if len(parts) == 1:
        return parts[0]
    causes: dict[str, float] = defaultdict(float)
    ttft: dict[str, float] = defaultdict(float)
    best: dict[str, float] = {}
    culprits = {}
    evidence: dict[str, list[str]] = {}
    for part in parts:
        for cause, ms in part.causes.items():
            causes[cause] += ms
            if cause in part.culprits and ms > best.get(cause, 0.0):
                best[cause] = ms
                culprits[cause], evidence[cause] = part.culprits[cause], part.evidence.get(cause, [])
        for cause, ms in part.ttft_causes.items():
            ttft[cause] += ms
    segments = [s for part in parts for s in part.segments]
    path = Path(
        parts[0].path.start_ns,
        parts[-1].path.end_ns,
        [s for part in parts for s in part.path.segments],
        sum(part.path.hops for part in parts),
    )
    return Classified(path, segments, dict(causes), dict(ttft), culprits, evidence)


def compact(segments: list[Segment], limit: int = MAX_SEGMENTS) -> list[Segment]:
    """Return at most about *limit* segments that tile the same interval.

    Short ones are taken into their neighbour, shortest first, in steps of a doubling threshold; the label is that
    of the longer one. Times per cause are counted before this, exactly.
    """
    threshold = _FIRST_THRESHOLD_NS
    while len(segments) > limit:
        out: list[Segment] = []
        for s in segments:
            last = out[-1] if out else None
            if last is None or min(last.end_ns - last.start_ns, s.end_ns - s.start_ns) >= threshold:
                out.append(s)
                continue
            longer = last if last.end_ns - last.start_ns >= s.end_ns - s.start_ns else s
            out[-1] = msgspec.structs.replace(longer, start_ns=last.start_ns, end_ns=s.end_ns)
        segments, threshold = out, threshold * 2
    return segments
