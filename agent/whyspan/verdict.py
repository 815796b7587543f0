"""Why a request was slow, or failed: the cause with most excess over the usual, in a sentence and in numbers."""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan import failures
from whyspan.baseline import BY_SENDER, Baseline, Usual
from whyspan.causes import Claim, Classified, Context, Rule, endings, own_cost, rule_out, rules
from whyspan.causes import client_self_queued as self_queued
from whyspan.causes import engine_model_changed as changed
from whyspan.engines import summary
from whyspan.latency import latency_ms, ttft_ms, waited_in_vain
from whyspan.model import FAILED, UNKNOWN, Culprit, Finding, Ranked, Request, Verdict
from whyspan.timeline import UNKNOWN_STATE

#: A cause that explains less than this share of the excess, while usual work explains more, is not claimed.
FLOOR_SHARE: Final = 0.25
#: No cause is claimed for less.
FLOOR_MS: Final = 1.0
#: Causes listed behind the first.
MAX_OTHERS: Final = 4
#: Greatest confidence without a baseline.
NO_BASELINE_CONFIDENCE: Final = 0.5
#: Confidence in a failure's cause that is only likely.
INFERRED_CONFIDENCE: Final = 0.5
# Lost events halve the confidence at this share of those seen.
_LOST_HALF: Final = 0.05


class _Phase(NamedTuple):
    """The part of a request that is judged: its time, what is usual for it, and its causes. In ms."""

    name: str
    wall: float
    usual_wall: float
    causes: dict[str, float]
    usual: dict[str, float]

    @property
    def excess(self) -> float:
        return self.wall - self.usual_wall

    def excesses(self) -> list[tuple[float, str]]:
        """Return (excess, cause), greatest first."""
        return sorted(((ms - self.usual.get(c, 0.0), c) for c, ms in self.causes.items()), reverse=True)


def explain(  # noqa: PLR0917
    request: Request,
    classified: Classified,
    baseline: Baseline,
    slow_reason: str | None,
    lost_events: int,
    ctx: Context,
) -> Finding:
    """Return the finding for a request.

    Args:
        request: A finished request.
        classified: Its path with causes.
        baseline: What is usual.
        slow_reason: Why it counts as slow; empty or None when it does not, which yields no verdict, or, for a failed
            request, that no cause is known.
        lost_events: Events dropped in its window.
        ctx: The context the path was classified in.
    """
    usual = baseline.usual(request)
    # The context may be that of its last slice.
    engine = ctx.engine.of(request) if ctx.engine is not None else None
    usual_ms = {c: median for c, (median, _) in usual.causes.items()} if usual is not None else {}
    wall_ns = max(request.end_ns - request.start_ns, 0)
    not_known = sum(s.end_ns - s.start_ns for s in classified.segments if s.state == UNKNOWN_STATE)
    finding = Finding(
        request=request,
        slow=bool(slow_reason),
        slow_reason=slow_reason or "",
        wall_ns=wall_ns,
        accounted_ns=wall_ns - not_known,
        segments=classified.segments,
        causes=classified.causes,
        baseline=usual_ms,
        baseline_count=usual.requests if usual is not None else 0,
        verdict=Verdict(),
        lost_events=lost_events,
        process=ctx.facts.process(request.tgid),
        phases=summary.phases(engine) if engine is not None else [],
        engine=summary.facts(engine) if engine is not None else None,
    )
    failed = request.outcome in FAILED
    if not slow_reason and not failed:
        return finding
    whole = _Phase("stream", latency_ms(request), _latency(usual), classified.causes, usual_ms)
    # A time to first byte that is too long is explained by what came before that byte, however long the
    # stream went on.
    early = (slow_reason or "").startswith("ttft") or waited_in_vain(request)
    judged = _ttft(request, classified, usual) if early else whole
    if slow_reason:
        finding.phase = _where(request, usual, slow_reason)
        finding.verdict = _before(
            request, judged, slow_reason, _verdict(judged, classified, usual, lost_events, ctx)
        )
    else:
        finding.verdict = _not_slow(judged, usual)
    died = failures.deaths(request, ctx.facts)
    if failed:
        told = "; ".join([failures.ending(request, ctx.facts), *died[:1]])
        known = endings.why(ctx)
        if known is not None:
            finding.verdict = _failed(told, *known, judged.excess, finding.verdict)
        else:
            finding.verdict.sentence = f"{told}{'. ' if slow_reason else '; '}{finding.verdict.sentence}"
    finding.verdict.evidence += died
    finding.verdict.evidence += own_cost.evidence(classified.path, ctx)
    if ctx.engine is not None and ctx.engine.core and ctx.engine.layer:
        finding.verdict.evidence.append(ctx.engine.layer)
    _behind(finding.verdict, ctx)
    finding.ruled_out = rule_out(classified, ctx, finding.verdict.cause)
    return finding


def _failed(told: str, rule: Rule, claim: Claim, excess: float, here: Verdict) -> Verdict:
    """Return the verdict on a request whose failure has a cause of its own, before what took its time."""
    slow = here.cause != UNKNOWN
    behind = Ranked(cause=here.cause, excess_ms=here.excess_ms, share=here.share, culprit=here.culprit)
    return Verdict(
        cause=claim.cause,
        excess_ms=max(excess, 0.0),
        share=1.0,
        confidence=INFERRED_CONFIDENCE if claim.inferred else 1.0,
        culprit=claim.culprit or Culprit(),
        sentence=f"{told}: {claim.detail}.",
        evidence=[claim.detail, *([here.sentence] if here.sentence else [])],
        fix=rule.fix,
        others=[behind, *here.others][:MAX_OTHERS] if slow else [],
    )


def _behind(verdict: Verdict, ctx: Context) -> None:
    """Add to a verdict what led to its cause."""
    for claim in endings.behind(verdict.cause, ctx):
        verdict.evidence.append(f"behind it {claim.cause}: {claim.detail}")
        led = Ranked(
            cause=claim.cause,
            excess_ms=verdict.excess_ms,
            share=verdict.share,
            culprit=claim.culprit or Culprit(),
        )
        verdict.others = [led, *(o for o in verdict.others if o.cause != claim.cause)][:MAX_OTHERS]


def _latency(usual: Usual | None) -> float:
    return usual.latency_median if usual is not None else 0.0


def _ttft(request: Request, classified: Classified, usual: Usual | None) -> _Phase:
    name = "wait" if waited_in_vain(request) else "ttft"
    if usual is None:
        return _Phase(name, ttft_ms(request), 0.0, classified.ttft_causes, {})
    known = {c: median for c, (median, _) in usual.ttft_causes.items()}
    if not known and usual.latency_median > 0:
        # No figures for this phase alone: its share of the whole.
        share = min(usual.ttft_median / usual.latency_median, 1.0)
        known = {c: median * share for c, (median, _) in usual.causes.items()}
    return _Phase(name, ttft_ms(request), usual.ttft_median, classified.ttft_causes, known)


def _where(request: Request, usual: Usual | None, reason: str) -> str:
    ttft = ttft_ms(request)
    if reason.startswith("ttft") or ttft < 0:
        return "ttft"
    before = ttft - (usual.ttft_median if usual is not None else 0.0)
    after = latency_ms(request) - ttft
    if usual is not None:
        after -= max(usual.latency_median - usual.ttft_median, 0.0)
    return "ttft" if before >= after else "stream"


def _verdict(
    phase: _Phase, classified: Classified, usual: Usual | None, lost_events: int, ctx: Context
) -> Verdict:
    ranked = phase.excesses()
    by_id = {r.id: r for r in rules()}
    real = [(ms, c) for ms, c in ranked if c in by_id]
    total = phase.excess
    if not real or not ranked or total <= 0 or real[0][0] < FLOOR_MS:
        return _no_rule(phase, ranked, usual, ctx)
    excess, cause = real[0]
    share = min(excess / total, 1.0)
    if ranked[0][1] != cause and share < FLOOR_SHARE:
        return _no_rule(phase, ranked, usual, ctx)
    confidence = share * _seen(lost_events, ctx) * (1.0 - 0.5 * _inferred(classified, cause))
    if usual is None:
        confidence = min(confidence, NO_BASELINE_CONFIDENCE)
    culprit = classified.culprits.get(cause, Culprit())
    evidence = list(classified.evidence.get(cause, ()))
    evidence.append(_usual_line(phase, cause, usual))
    if lost_events:
        evidence.append(f"{lost_events} events were lost in the window")
    others = [
        Ranked(
            cause=other,
            excess_ms=ms,
            share=min(ms / total, 1.0),
            culprit=classified.culprits.get(other, Culprit()),
        )
        for ms, other in real[1:]
        if ms >= FLOOR_MS
    ]
    return Verdict(
        cause=cause,
        excess_ms=excess,
        share=share,
        confidence=confidence,
        culprit=culprit,
        sentence=_sentence(phase, by_id[cause], excess, culprit, usual),
        evidence=evidence,
        fix=by_id[cause].fix,
        others=others[:MAX_OTHERS],
    )


def _not_slow(phase: _Phase, usual: Usual | None) -> Verdict:
    """Return the verdict on a failed request whose time was ordinary, to follow a semicolon."""
    if usual is None:
        return Verdict(sentence="no baseline yet.", evidence=["baseline: none yet for this service and size"])
    known = {r.id for r in rules()}
    more = [(ms, c) for ms, c in phase.excesses() if c in known and ms >= FLOOR_MS]
    evidence = [f"{c}: {ms:.1f} ms over the usual" for ms, c in more[:3]]
    if more:
        return Verdict(sentence=f"its time is not unusual ({phase.wall:.0f} ms).", evidence=evidence)
    return Verdict(sentence="no cause takes more time than usual.")


def _before(request: Request, phase: _Phase, reason: str, here: Verdict) -> Verdict:
    """Set what happened here beside the time that the request waited with its sender, before it arrived."""
    waited = request.client_wait_ns / 1e6
    if waited < FLOOR_MS:
        return here
    rule = self_queued.RULE
    if waited <= phase.excess:
        here.evidence.append(f"also {rule.id}: {waited:.1f} ms before it arrived, {BY_SENDER}")
        return here
    total = waited + max(phase.excess, 0.0)
    culprit = self_queued.culprit(request)
    slow_here = BY_SENDER not in reason and here.cause != UNKNOWN
    behind = Ranked(
        cause=here.cause, excess_ms=here.excess_ms, share=here.excess_ms / total, culprit=here.culprit
    )
    usually = f", usually {failures.in_ms(phase.usual_wall)}" if phase.usual_wall else ""
    return Verdict(
        cause=rule.id,
        excess_ms=waited,
        share=waited / total,
        confidence=NO_BASELINE_CONFIDENCE,  # it is what the sender says
        culprit=culprit,
        sentence=(
            f"{failures.in_ms(waited)} {rule.title}, {BY_SENDER}: {culprit.kind} {culprit.name}. "
            f"Here it took {failures.in_ms(phase.wall)}{usually}."
        ),
        evidence=[
            f"the head says when the request began: {waited:.1f} ms before its first byte arrived, the least delay "
            "of this sender's latest requests, which may be its clock, subtracted",
            *([f"also {here.cause}: {here.excess_ms:.1f} ms of excess here"] if slow_here else []),
        ],
        fix=rule.fix,
        others=[behind, *here.others][:MAX_OTHERS] if slow_here else [],
    )


def _seen(lost_events: int, ctx: Context) -> float:
    return 1.0 / (1.0 + lost_events / max(_LOST_HALF * ctx.timelines.event_count, 1.0))


def _inferred(classified: Classified, cause: str) -> float:
    mine = [(s.end_ns - s.start_ns, s.inferred) for s in classified.segments if s.cause == cause]
    total = sum(ns for ns, _ in mine)
    return sum(ns for ns, inferred in mine if inferred) / total if total else 0.0


def _usual_line(phase: _Phase, cause: str, usual: Usual | None) -> str:
    if usual is None:
        return "baseline: none yet for this service and size"
    return f"usually {phase.usual.get(cause, 0.0):.1f} ms of it: the median of {usual.requests} such requests"


def _against(phase: _Phase, usual: Usual | None) -> str:
    what = {"ttft": "First byte after", "wait": "No byte of an answer in"}.get(phase.name, "Took")
    if usual is None:
        return f"{what} {failures.in_ms(phase.wall)} (no baseline yet)"
    usually = "usually the first after" if phase.name == "wait" else "usually"
    return f"{what} {failures.in_ms(phase.wall)}, {usually} {failures.in_ms(phase.usual_wall)}"


def _sentence(phase: _Phase, rule: Rule, excess: float, culprit: Culprit, usual: Usual | None) -> str:
    who = ""
    if culprit.name:
        number = culprit.tid or culprit.tgid
        named = f"{culprit.kind} {culprit.name}" + (
            f" ({number})" if number and culprit.kind in ("process", "thread") else ""
        )
        who = f": {named}" + (f", {culprit.detail}" if culprit.detail else "")
    return (
        f"{_against(phase, usual)}; {excess:.0f} ms {'more than usual ' if usual else ''}{rule.title}{who}."
    )


def _no_rule(phase: _Phase, ranked: list[tuple[float, str]], usual: Usual | None, ctx: Context) -> Verdict:
    """No rule claims the excess: it is ordinary work that takes longer. By another model, if it is another."""
    culprit = changed.culprit(ctx)
    if culprit is None or usual is None or phase.excess < FLOOR_MS:
        return _unknown(phase, ranked, usual)
    rule = next(r for r in rules() if r.id == changed.RULE.id)
    return Verdict(
        cause=rule.id,
        excess_ms=phase.excess,
        share=1.0,
        # That the model changed is certain; that this is why, only likely.
        confidence=NO_BASELINE_CONFIDENCE,
        culprit=culprit,
        sentence=_sentence(phase, rule, phase.excess, culprit, usual),
        evidence=[f"{c}: {ms:.1f} ms over the usual" for ms, c in ranked[:3] if ms > 0],
        fix=rule.fix,
    )


def _unknown(phase: _Phase, ranked: list[tuple[float, str]], usual: Usual | None) -> Verdict:
    if ranked and ranked[0][0] > 0:
        ms, cause = ranked[0]
        most = f"; most of the excess is {cause} ({ms:.0f} ms), and no known cause explains it"
    else:
        most = "; no cause takes more time than usual"
    evidence = [f"{c}: {ms:.1f} ms over the usual" for ms, c in ranked[:3] if ms > 0]
    if usual is None:
        evidence.append("baseline: none yet for this service and size")
    return Verdict(
        cause=UNKNOWN,
        excess_ms=max(phase.excess, 0.0),
        sentence=f"{_against(phase, usual)}{most}.",
        evidence=evidence,
    )
