"""Draws a request's critical path as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from whyspan.model import Segment
from whyspan.text import clean

MAX_ROWS = 30
_BAR_WIDTH = 24


class Group(NamedTuple):
    """Neighbouring segments shown as one row; ``mixed`` when they are of several kinds, the longest named."""

    start_ns: int
    end_ns: int
    segment: Segment
    pieces: int
    mixed: bool


def merge(segments: Sequence[Segment]) -> list[Group]:
    """Join neighbours of the same cause, state and thread. Order and total time are kept."""
    groups: list[Group] = []
    for s in segments:
        last = groups[-1] if groups else None
        if last is not None and _kind(last.segment) == _kind(s) and last.end_ns == s.start_ns:
            longest = max(last.segment, s, key=_length)
            groups[-1] = Group(last.start_ns, s.end_ns, longest, last.pieces + 1, False)
        else:
            groups.append(Group(s.start_ns, s.end_ns, s, 1, False))
    return groups


def coalesce(groups: Sequence[Group], max_rows: int = MAX_ROWS) -> list[Group]:
    """Keep the longest groups and fold runs of shorter ones between them, into at most *max_rows* rows."""
    if len(groups) <= max_rows:
        return list(groups)
    by_length = sorted(range(len(groups)), key=lambda i: groups[i].start_ns - groups[i].end_ns)
    for kept in range(max_rows, -1, -1):
        rows = _fold(groups, frozenset(by_length[:kept]))
        if len(rows) <= max_rows:
            return rows
    return _fold(groups, frozenset())


def lines(segments: Sequence[Segment], start_ns: int, wall_ns: int, block: str = "█") -> list[str]:
    """Return the rows of the timeline: offset and length in ms, a bar, state, cause, thread, detail.

    Args:
        segments: In order of time.
        start_ns: Where the request starts (CLOCK_MONOTONIC).
        wall_ns: How long it took.
        block: What bars are made of.
    """
    out = []
    for g in coalesce(merge(segments)):
        s = g.segment
        what = f"{clean(s.state, 10):<10} {clean(s.cause, 26):<26} "
        if g.mixed:
            what += f"({g.pieces} short pieces, the longest on {clean(s.thread, 20)})"
        else:
            what += f"{clean(s.thread, 20)} [{s.tid}]"
            what += f" {clean(s.detail, 60)}" if s.detail else ""
            what += " (inferred)" if s.inferred else ""
        offset_ms, length_ms = (g.start_ns - start_ns) / 1e6, (g.end_ns - g.start_ns) / 1e6
        out.append(f"{offset_ms:>10.2f} {length_ms:>10.2f}  {_bar(g, start_ns, wall_ns, block)}  {what}")
    return out


def _kind(segment: Segment) -> tuple[str, str, int, str]:
    return segment.cause, segment.state, segment.tid, segment.detail


def _length(segment: Segment) -> int:
    return segment.end_ns - segment.start_ns


def _fold(groups: Sequence[Group], keep: frozenset[int]) -> list[Group]:
    rows: list[Group] = []
    run: list[Group] = []
    for i, group in enumerate(groups):
        if i not in keep:
            run.append(group)
            continue
        if run:
            rows.append(_folded(run))
            run = []
        rows.append(group)
    if run:
        rows.append(_folded(run))
    return rows


def _folded(run: Sequence[Group]) -> Group:
    if len(run) == 1:
        return run[0]
    longest = max((g.segment for g in run), key=_length)
    return Group(run[0].start_ns, run[-1].end_ns, longest, sum(g.pieces for g in run), True)


def _bar(group: Group, start_ns: int, wall_ns: int, block: str) -> str:
    wall = max(wall_ns, 1)
    first = round((group.start_ns - start_ns) * _BAR_WIDTH / wall)
    first = min(max(first, 0), _BAR_WIDTH - 1)
    last = round((group.end_ns - start_ns) * _BAR_WIDTH / wall)
    last = min(max(last, first + 1), _BAR_WIDTH)  # every row shows something
    return " " * first + block * (last - first) + " " * (_BAR_WIDTH - last)
