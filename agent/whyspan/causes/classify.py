"""Give every segment of a path its cause, and every cause its culprit."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import product
from typing import Final, NamedTuple

from whyspan.causes import work
from whyspan.causes.context import MS, Context
from whyspan.causes.cpu_runqueue import LONG_WAIT_NS
from whyspan.causes.held import linked
from whyspan.causes.rule import LOCK, LONG_WAIT, Claim, Conditional, Needing, OfStates, Rule, rules
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit, RuledOut, Segment
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, THROTTLED, WAKEUP

#: Those a cause may be found for; what is unknown stays so.
STATES: Final = (RUNNING, RUNNABLE, WAKEUP, THROTTLED, BLOCKED)
_CPU_WAITS: Final = (RUNNABLE, WAKEUP)

#: Of segments: their state, whether a wait for a lock led to them, and whether they are a short wait for a CPU.
_Sort = tuple[str, bool, bool]


class Classified(NamedTuple):
    """A path with causes. Times in ``causes`` and ``ttft_causes`` are ms; the latter stop at the first byte.

    ``culprits`` holds, per root cause, the one with most time; ``evidence`` what was seen, in sentences.
    """

    path: Path
    segments: list[Segment]
    causes: dict[str, float]
    ttft_causes: dict[str, float]
    culprits: dict[str, Culprit]
    evidence: dict[str, list[str]]


def classify(path: Path, ctx: Context) -> Classified:
    """Return the path's segments with causes; they tile the same interval."""
    ctx.path = path
    segments: list[Segment] = []
    blamed: dict[str, dict[Culprit, int]] = defaultdict(lambda: defaultdict(int))
    asked = applicable(ctx)
    todo = list(reversed(path.segments))
    while todo:
        piece = todo.pop()
        claim = _claim(piece, ctx, asked)
        lo = max(claim.start_ns or piece.start_ns, piece.start_ns)
        hi = min(claim.end_ns or piece.end_ns, piece.end_ns)
        if lo >= hi:  # a claim beside its segment: a rule's defect must not cost the tiling
            claim, lo, hi = work.match(piece, ctx), piece.start_ns, piece.end_ns
        if hi < piece.end_ns:
            todo.append(piece._replace(start_ns=hi))
        if lo > piece.start_ns:
            # What lies before the claimed part is asked about again, first.
            todo.append(piece._replace(start_ns=lo, end_ns=hi))
            todo.append(piece._replace(end_ns=lo))
            continue
        if hi < piece.end_ns:
            piece = piece._replace(end_ns=hi)
        _append(segments, _segment(piece, claim, ctx))
        if claim.culprit is not None:
            blamed[claim.cause][claim.culprit] += hi - lo
    culprits = {c: max(who.items(), key=lambda kv: kv[1])[0] for c, who in blamed.items()}
    first = ctx.request.first_ns or ctx.request.head_ns or path.end_ns
    return Classified(
        path,
        segments,
        _totals(segments, path.end_ns),
        _totals(segments, first),
        culprits,
        _evidence(segments, blamed),
    )


def rule_out(classified: Classified, ctx: Context, claimed: str = "") -> list[RuledOut]:
    """Return every root cause but the claimed one with the check that set it aside."""
    out: list[RuledOut] = []
    for rule in rules():
        if rule.id == claimed:
            continue
        ms = classified.causes.get(rule.id, 0.0)
        check = rule.rule_out(classified.path, ctx)
        out.append(RuledOut(rule.id, f"{ms:.1f} ms on the path, not the largest; {check}" if ms else check))
    return out


def applicable(ctx: Context) -> dict[_Sort, list[Rule]]:
    """Return, by sort of segment, the rules that may claim it; most of the engine's have nothing to say."""
    able = {r.id for r in rules() if r.id not in _conditional() or _conditional()[r.id].applies(ctx)}
    return {sort: [r for r in asked if r.id in able] for sort, asked in _by_sort().items()}


@cache
def _conditional() -> dict[str, Conditional]:
    return {r.id: r for r in rules() if isinstance(r, Conditional)}


@cache
def _by_sort() -> dict[_Sort, list[Rule]]:
    # Once for all: to ask whether an object meets a protocol takes longer than most rules do.
    states = {r.id: r.states if isinstance(r, OfStates) else frozenset(STATES) for r in rules()}
    needs = {r.id: r.needs if isinstance(r, Needing) else frozenset() for r in rules()}
    sorts = product(STATES, (False, True), (False, True))
    return {
        (state, locked, short): [
            r
            for r in rules()
            if state in states[r.id]
            and (locked or LOCK not in needs[r.id])
            and not (short and LONG_WAIT in needs[r.id])
        ]
        for state, locked, short in sorts
    }


def _claim(piece: PathSegment, ctx: Context, asked: dict[_Sort, list[Rule]]) -> Claim:
    short = piece.state in _CPU_WAITS and piece.whole_ns < LONG_WAIT_NS
    for rule in asked.get((piece.state, piece.via is not None, short), ()):
        claim = rule.match(piece, ctx)
        if claim is not None:
            return linked(claim, piece, ctx)
    return work.match(piece, ctx)


def _segment(piece: PathSegment, claim: Claim, ctx: Context) -> Segment:
    return Segment(
        start_ns=piece.start_ns,
        end_ns=piece.end_ns,
        tgid=piece.tgid,
        tid=piece.tid,
        thread=ctx.thread_label(piece.tid, piece.tgid),
        state=piece.state,
        cause=claim.cause,
        detail=claim.detail,
        inferred=piece.inferred or claim.inferred,
    )


def _append(segments: list[Segment], s: Segment) -> None:
    last = segments[-1] if segments else None
    if last is not None and (last.tid, last.state, last.cause, last.detail, last.inferred) == (
        s.tid,
        s.state,
        s.cause,
        s.detail,
        s.inferred,
    ):
        last.end_ns = s.end_ns
    else:
        segments.append(s)


def _totals(segments: list[Segment], until_ns: int) -> dict[str, float]:
    ns: dict[str, int] = defaultdict(int)
    for s in segments:
        if s.start_ns < until_ns:
            ns[s.cause] += min(s.end_ns, until_ns) - s.start_ns
    return {cause: total / MS for cause, total in sorted(ns.items())}


def _evidence(segments: list[Segment], blamed: dict[str, dict[Culprit, int]]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for cause, who in blamed.items():
        mine = [s for s in segments if s.cause == cause]
        longest = max(mine, key=lambda s: s.end_ns - s.start_ns)
        total = sum(s.end_ns - s.start_ns for s in mine) / MS
        lines = [
            f"{total:.1f} ms in {len(mine)} segment{'s' if len(mine) > 1 else ''} of the critical path, "
            f"the longest {(longest.end_ns - longest.start_ns) / MS:.1f} ms on thread "
            f"{longest.thread} ({longest.tid})"
        ]
        if longest.detail:
            lines.append(longest.detail)
        ranked = sorted(who.items(), key=lambda kv: -kv[1])[:3]
        if len(ranked) > 1:
            lines.append("by culprit: " + ", ".join(f"{c.name} {ns / MS:.1f} ms" for c, ns in ranked))
        out[cause] = lines
    return out
