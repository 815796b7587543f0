"""The tracks of a request's timeline, and its critical path across them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from whyspan_exporters.metrics.states import number
from whyspan_exporters.recall import Sample

from whyspan.model import Finding, PhaseTime, Segment, StepTime
from whyspan.pressure import RESOURCES
from whyspan.views.shapes import Lane, Piece

Clean = Callable[[str], str]
T = TypeVar("T", Segment, PhaseTime, StepTime)


def _placed(found: list[T], finding: Finding) -> Iterator[tuple[T, int, int]]:
    """Yield what happened in a request in order, with its begin and end in ns since the request's start.

    None overlaps the one before or leaves the request: of the agent's segments and phases none does; steps do where a
    batch is made up while the one before runs, and a finding that others made may say anything.
    """
    start, at = finding.request.start_ns, 0
    for one in sorted(found, key=lambda one: one.start_ns):
        begin, end = max(one.start_ns - start, at), min(one.end_ns - start, finding.wall_ns)
        if end > begin:
            at = end
            yield one, begin, end


def threads(finding: Finding, clean: Clean) -> tuple[list[Lane], list[tuple[int, int]]]:
    """Return a lane per thread, in the order in which the path visits them, and the path over these lanes."""
    lanes: list[Lane] = []
    known: dict[tuple[int, int], int] = {}
    path = []
    for s, begin, end in _placed(finding.segments, finding):
        index = known.get((s.tgid, s.tid))
        if index is None:
            index = known[s.tgid, s.tid] = len(lanes)
            label = clean(s.thread) or (f"thread {s.tid}" if s.tid else "not known")
            lanes.append(
                Lane(key=f"tid:{s.tid}", kind="thread", label=label, tgid=s.tgid, tid=s.tid, spans=[])
            )
        spans = lanes[index].spans
        path.append((index, len(spans)))
        spans.append(Piece(begin, end, clean(s.state), clean(s.cause), clean(s.detail), s.inferred))
    return lanes, path


def phases(finding: Finding, clean: Clean) -> list[Lane]:
    """Return the lane of the engine's phases, else of what the first byte parts; none without either."""
    start, wall = finding.request.start_ns, finding.wall_ns
    first = finding.request.first_ns - start
    spans = [
        Piece(begin, end, clean(p.name), "", "", False) for p, begin, end in _placed(finding.phases, finding)
    ]
    if not spans and 0 < first < wall:
        spans = [Piece(0, first, "ttft", "", "", False), Piece(first, wall, "stream", "", "", False)]
    return [Lane(key="phases", kind="phase", label="phases", spans=spans)] if spans else []


def steps(finding: Finding) -> list[Lane]:
    """Return the lanes of the engine's steps, of their batch and of the KV pool; none where they are not known."""
    times = finding.engine.step_times if finding.engine is not None else []
    start = finding.request.start_ns
    spans = [
        Piece(begin, end, "step" if t.mine else "others' step", "", _step(t), False)
        for t, begin, end in _placed(times, finding)
    ]
    if not spans:
        return []
    out = [Lane(key="steps", kind="steps", label="engine steps", spans=spans)]
    times = sorted((t for t in times if t.start_ns - start < finding.wall_ns), key=lambda t: t.start_ns)
    batch = _changes((t.start_ns - start, float(t.batch)) for t in times)
    out.append(Lane(key="batch", kind="counter", label="sequences in the step", points=batch, unit="count"))
    used = _changes((t.start_ns - start, t.kv_usage) for t in times if 0 <= t.kv_usage <= 1)
    if used:
        out.append(Lane(key="kv", kind="counter", label="KV pool in use", points=used, unit="ratio"))
    return out


def _step(t: StepTime) -> str:
    batch = f"batch {t.batch}, {t.tokens} tokens"
    return batch if t.count == 1 else f"{t.count} steps, {batch}"


def pressure(samples: Iterable[Sample], start_unix_ns: int, wall_ns: int) -> list[Lane]:
    """Return a lane per resource for which tasks waited (PSI, some) during the request.

    Args:
        samples: Of the collector, in order; each holds for the 10 s from its start on.
        start_unix_ns: When the request began.
        wall_ns: How long it took.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for s in samples:
        at = s.start_unix_ns - start_unix_ns
        told = s.told.get("pressure")
        if at >= wall_ns or not isinstance(told, dict):
            continue
        for resource in RESOURCES:
            value = told.get(resource)
            some = number(value.get("some")) if isinstance(value, dict) else None
            if some is not None:
                found.setdefault(resource, []).append((at, some))
    return [
        Lane(
            key=f"pressure:{resource}",
            kind="counter",
            label=f"{resource} pressure of the host",
            points=_changes(points),
            unit="ratio",
        )
        for resource, points in found.items()
    ]


def _changes(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points at which the value is another; what was before the request is at its start."""
    out: list[tuple[int, float]] = []
    for when, value in points:
        at = max(when, 0)
        if out and out[-1][0] == at:
            out[-1] = at, value
        elif not out or out[-1][1] != value:
            out.append((at, value))
    return out
