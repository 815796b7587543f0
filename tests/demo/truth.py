"""Ground truth, from the client's clock and the injector only.

The rule: a request belongs to a fault when it *started* while the fault was on (after the injection was
complete, before its removal began). It is *slowed* when its latency is above the healthy P99. A healthy one
started at least ``TAIL_NS`` after the last removal and after every request of that fault had ended, and ended
before the next injection began. Everything else overlaps an edge and is neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TAIL_NS = 500_000_000


@dataclass(frozen=True)
class Sent:
    """One request as the client saw it; times are CLOCK_MONOTONIC ns."""

    trace_id: str
    start_ns: int
    first_ns: int
    end_ns: int
    status: int
    error: str

    @property
    def latency_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Window:
    """When a fault was on: ``begin_ns``..``on_ns`` it was being injected, ``off_ns``..``end_ns`` removed."""

    fault: str
    begin_ns: int
    on_ns: int
    off_ns: int
    end_ns: int


@dataclass(frozen=True)
class Truth:
    """Requests by what they are; ``limit_ns`` is the healthy P99."""

    healthy: list[Sent]
    members: dict[str, list[Sent]]
    slowed: dict[str, list[Sent]]
    limit_ns: int
    usual_ns: int


def read_sent(path: Path) -> list[Sent]:
    """The client's records so far, in order of their ends; a line that is still being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    names = Sent.__dataclass_fields__
    return [Sent(**{k: v for k, v in json.loads(line).items() if k in names}) for line in lines]


def percentile(values: Iterable[int], ratio: float) -> int:
    """Nearest-rank percentile; 0 when there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(ratio * len(ordered)))] if ordered else 0


def started_in(sent: Iterable[Sent], window: Window) -> list[Sent]:
    return [s for s in sent if window.on_ns <= s.start_ns < window.off_ns]


def is_healthy(request: Sent, sent: Sequence[Sent], windows: Sequence[Window]) -> bool:
    """Whether no fault and no fault's tail touches the request."""
    for window in windows:
        if request.end_ns < window.begin_ns:
            continue
        overlapping = [s.end_ns for s in sent if s.start_ns < window.end_ns and s.end_ns > window.begin_ns]
        if request.start_ns < max([window.end_ns, *overlapping]) + TAIL_NS:
            return False
    return request.status == 200 and not request.error


def judge(sent: Sequence[Sent], windows: Sequence[Window], not_before_ns: int = 0) -> Truth:
    """Sort requests that started from ``not_before_ns`` on: healthy ones, and the slowed of each fault."""
    considered = [s for s in sent if s.start_ns >= not_before_ns]
    healthy = [s for s in considered if is_healthy(s, considered, windows)]
    limit_ns = percentile((s.latency_ns for s in healthy), 0.99)
    members: dict[str, list[Sent]] = {w.fault: [] for w in windows}
    for window in windows:
        members[window.fault] += started_in(considered, window)
    slowed = {fault: [s for s in group if s.latency_ns > limit_ns] for fault, group in members.items()}
    usual_ns = int(median(s.latency_ns for s in healthy)) if healthy else 0
    return Truth(healthy, members, slowed, limit_ns, usual_ns)
