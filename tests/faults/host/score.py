"""Judges findings against what the client saw. Pure: records in, scores out.

A request belongs to a case when it started while the case's fault was on. It is *slowed* when it took more than
twice the usual and more than the objective. A *healthy* one started after the tail of every earlier fault and ended
before the next one began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whyspan.model import UNKNOWN, Culprit, Finding

from tests.demo.truth import TAIL_NS, Sent

NEEDED = 0.9  # of a case's slowed requests
SLOWED_RATIO = 2.0
TOP = 3


@dataclass(frozen=True)
class Window:
    """When a fault was on: being injected from ``begin_ns``, on from ``on_ns`` to ``off_ns``, gone at ``end_ns``."""

    begin_ns: int
    on_ns: int
    off_ns: int
    end_ns: int


def is_slowed(request: Sent, usual_ns: int, objective_ns: int) -> bool:
    """Whether a request that was served was slow by the client's clock."""
    served = request.status == 200 and not request.error
    return served and request.latency_ns > max(SLOWED_RATIO * usual_ns, objective_ns)


def is_failed(request: Sent) -> bool:
    """Whether a request reached the server and failed."""
    return bool(request.status not in (200, 0) or request.error) and request.error != "ConnectionRefusedError"


def healthy(sent: Sequence[Sent], windows: Iterable[Window], since_ns: int) -> list[Sent]:
    """Return the requests that no fault and no fault's tail touches."""
    edges = []
    for w in windows:
        touched = (s.end_ns for s in sent if s.start_ns < w.end_ns and s.end_ns > w.begin_ns)
        edges.append((w.begin_ns, max(w.end_ns, *touched, 0) + TAIL_NS))
    return [
        s
        for s in sent
        if s.start_ns >= since_ns
        and s.status == 200
        and not s.error
        and all(s.end_ns < begin or s.start_ns >= end for begin, end in edges)
    ]


@dataclass(frozen=True)
class Judged:
    """One slowed request of a case. ``others``: causes behind the first, in order."""

    trace_id: str
    latency_ms: float
    cause: str  # empty: no finding
    others: tuple[str, ...] = ()
    culprit: str = ""
    cause_right: bool = False
    culprit_right: bool = False
    unknown_ms: float = 0.0
    verdict_s: float | None = None
    sentence: str = ""
    code: str = ""  # the function that the verdict names

    @property
    def right(self) -> bool:
        """Whether it names the right cause and the right culprit."""
        return self.cause_right and self.culprit_right

    def among(self, causes: Iterable[str]) -> bool:
        """Whether one of these is among the first three."""
        return bool({self.cause, *self.others[: TOP - 1]} & set(causes))


def allowed(causes: Iterable[str], parents: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids that are right: those listed, and their parents."""
    listed = tuple(causes)
    return listed + tuple(parents[c] for c in listed if c in parents and parents[c] not in listed)


def plain(culprit: Culprit) -> dict[str, Any]:
    """Return a culprit's fields."""
    return {name: getattr(culprit, name) for name in culprit.__struct_fields__}


def judge(
    request: Sent,
    finding: Finding | None,
    arrived_ns: int | None,
    causes: Sequence[str],
    names: Callable[[Mapping[str, Any]], bool],
) -> Judged:
    """Judge what was found on one slowed request. *causes*: all that are right."""
    latency_ms = request.latency_ns / 1e6
    if finding is None:
        return Judged(request.trace_id, latency_ms, "")
    v = finding.verdict
    c = v.culprit
    try:
        culprit_right = bool(names(plain(c)))
    except Exception as exc:  # a fault's own test of a culprit must not end the run
        culprit_right, c = False, Culprit(kind="error", name=f"names(): {type(exc).__name__}: {exc}")
    return Judged(
        request.trace_id,
        latency_ms,
        v.cause,
        tuple(o.cause for o in v.others),
        " ".join(str(x) for x in (c.kind, c.name, c.tgid or "", c.tid or "", c.detail) if x),
        v.cause in causes,
        culprit_right,
        min(finding.causes.get(UNKNOWN, 0.0), latency_ms),
        (arrived_ns - request.end_ns) / 1e9 if arrived_ns is not None else None,
        v.sentence,
        v.code.function if v.code is not None else "",
    )


@dataclass
class CaseScore:
    """How a case went. ``error``: why it is not valid, such as a fault that did not bite."""

    server: str
    fault: str
    decoy: str
    causes: tuple[str, ...]
    error: str = ""
    bites: str = ""
    decoy_proof: str = ""
    decoy_missing: str = ""  # why there is no proof of the decoy
    members: int = 0
    on_s: float = 0.0
    code: tuple[str, ...] = ()  # functions that are right, see Fault.code
    excused: int = 0  # slowed ones that the agent says it did not explain, over its own limits
    judged: list[Judged] = field(default_factory=list)
    baselines: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)  # guesses per judged request

    @property
    def name(self) -> str:
        """Server, fault and decoy."""
        return f"{self.server}/{self.fault}" + (f"+{self.decoy}" if self.decoy else "")

    @property
    def valid(self) -> bool:
        """Whether it says something."""
        return not self.error and bool(self.judged)

    def _share(self, hits: int) -> float:
        return hits / len(self.judged) if self.judged else 0.0

    @property
    def top1_ratio(self) -> float:
        """Share of its slowed requests with the right cause and culprit."""
        return self._share(sum(j.right for j in self.judged))

    @property
    def top3_ratio(self) -> float:
        """Share of its slowed requests with the right cause among the first three."""
        return self._share(sum(j.among(self.causes) for j in self.judged))

    @property
    def code_ratio(self) -> float:
        """Share of the requests with the right verdict that names the right function."""
        mine = [j.code in self.code for j in self.judged if j.right]
        return sum(mine) / len(mine) if mine else 0.0

    @property
    def right(self) -> bool:
        """Whether enough are right."""
        return self.valid and self.top1_ratio >= NEEDED

    @property
    def top3(self) -> bool:
        """Whether enough have it among the first three."""
        return self.valid and self.top3_ratio >= NEEDED

    @property
    def excess_ms(self) -> float:
        """Median latency of the slowed."""
        times = sorted(j.latency_ms for j in self.judged)
        return times[len(times) // 2] if times else 0.0

    def misses(self) -> Counter[tuple[str, str]]:
        """Return what was said instead, with the first sentence that said so."""
        out: Counter[tuple[str, str]] = Counter()
        first: dict[str, str] = {}
        for j in self.judged:
            if j.right:
                continue
            said = j.cause or "no finding"
            if j.cause_right:
                said = f"{j.cause}, culprit {j.culprit or 'none'}"
            out[said, first.setdefault(said, j.sentence)] += 1
        return out

    def baseline_right(self, name: str, top: int) -> bool:
        """Whether a baseline's first *top* guesses are right for enough of its requests."""
        guesses = self.baselines.get(name, [])
        hits = sum(bool(set(g[:top]) & set(self.causes)) for g in guesses)
        return bool(guesses) and hits / len(guesses) >= NEEDED


def share(flags: Iterable[bool]) -> float:
    """Return the share that is true; 0 of nothing."""
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


def percentile(values: Iterable[float], ratio: float) -> float:
    """Return the nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(ratio * len(ordered)))] if ordered else 0.0


def confusion(cases: Iterable[CaseScore]) -> dict[str, dict[str, int]]:
    """Return how often each cause was named, by the expected one. In requests."""
    out: dict[str, Counter[str]] = {}
    for case in cases:
        row = out.setdefault(case.causes[0], Counter())
        for j in case.judged:
            row[case.causes[0] if j.cause_right else j.cause or "no finding"] += 1
    return {expected: dict(row.most_common()) for expected, row in sorted(out.items())}
