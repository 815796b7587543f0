"""``client.retry_storm``: the request waited behind work that clients sent again after they had given it up."""

from __future__ import annotations

from functools import cache
from typing import Final

from whyspan.causes.client_self_queued import sender_label
from whyspan.causes.context import MS, Context
from whyspan.causes.cpu_runqueue import waits_long
from whyspan.causes.retries import Storm, storm, tally
from whyspan.causes.rule import Claim, Conditional, Rule, rules
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, THROTTLED, WAKEUP

#: The causes by which a request waits behind others' work. While most of that work was sent again, that comes first.
BEHIND: Final = frozenset(
    {
        "cpu.oversubscribed",
        "python.gil",
        "python.pool_exhausted",
        "python.loop_blocked",
        "python.frontend_saturated",
        "engine.queueing",
        "engine.prefill_interference",
        "engine.kv_preemption",
        "engine.zombie_request",
    }
)


class _RetryStorm:
    id = "client.retry_storm"
    title = "behind requests that clients had sent again"
    neighbours = ("engine.queueing", "client.artifact", "python.pool_exhausted")
    fix = (
        "Try back-off with jitter and a cap in the client, a retry budget, a time-out longer than the server needs; "
        "and shed early here, with Retry-After."
    )
    rank = 21  # before the first of BEHIND
    states = frozenset({RUNNING, BLOCKED, RUNNABLE, WAKEUP, THROTTLED})

    def applies(self, ctx: Context) -> bool:
        """Return whether the request came in a storm of retries."""
        return storm(ctx) is not None

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what one of the causes of waiting behind others' work would claim, and its long waits for a CPU."""
        seen = storm(ctx)
        if seen is None:
            return None
        if waits_long(segment):
            rival = ctx.rival(segment)
            if rival is not None and rival.tgid in ctx.service_tgids:
                return Claim(self.id, f"waited for a CPU; {seen}", _culprit(seen, ctx))
        elif segment.start_ns < ctx.request.recv_ns and ctx.serves(segment.tid):
            end = min(segment.end_ns, ctx.request.recv_ns)
            return Claim(self.id, f"not read yet; {seen}", _culprit(seen, ctx), end_ns=end)
        for rule in ctx.memo(self.id, lambda: _applicable(ctx)):
            claim = rule.match(segment, ctx)
            if claim is not None:
                text = f"{claim.detail}; {seen}" if claim.detail else str(seen)
                return claim._replace(cause=self.id, detail=text, culprit=_culprit(seen, ctx))
        return None

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how many of the arrivals were retries."""
        seen = tally(ctx)
        if not seen.retries:
            return f"none of {seen.arrivals} arrivals looks like a retry; {seen.failed} attempts had failed"
        return str(seen)


@cache
def _behind() -> tuple[tuple[Rule, Conditional | None], ...]:
    return tuple((r, r if isinstance(r, Conditional) else None) for r in rules() if r.id in BEHIND)


def _applicable(ctx: Context) -> list[Rule]:
    return [r for r, conditional in _behind() if conditional is None or conditional.applies(ctx)]


def _culprit(seen: Storm, ctx: Context) -> Culprit:
    name = seen.sender or sender_label(ctx.request)
    delay = f", {seen.delay_ns / MS:.0f} ms after each failure" if seen.delay_ns else ""
    detail = f"{seen.amplification:.1f} arrivals per first attempt{delay}"
    return Culprit(kind="peer", name=f"{name} {seen.route}".strip(), detail=detail)


RULE = _RetryStorm()
