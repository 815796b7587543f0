"""``python.frontend_saturated``: the front end's one thread was busy all the time with many small pieces of work."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, RUNNING, UNKNOWN_STATE

#: A loop thread that is at rest for so little of the time has work waiting for it at any moment.
SATURATED: Final = 0.85
#: Over at least so long: shorter stretches are bursts.
MIN_WINDOW_NS: Final = 200_000_000


def utilisation(tid: int, ctx: Context) -> float:
    """Return the share of time a thread ran or was ready to, over the request and a fifth of a second at least."""

    def measure() -> float:
        r = ctx.request
        lo = min(r.start_ns, r.end_ns - MIN_WINDOW_NS)
        parts = ctx.timelines.thread(tid).intervals(lo, r.end_ns)
        known = sum(t - since for since, t, iv in parts if iv.state != UNKNOWN_STATE)
        rested = sum(t - since for since, t, iv in parts if iv.state == BLOCKED)
        return 1 - rested / known if known >= MIN_WINDOW_NS else 0.0

    return ctx.memo(("utilisation", tid), measure)


class _FrontendSaturated:
    id = "python.frontend_saturated"
    title = "behind the other requests' work on the front end's thread, which was busy all the time"
    neighbours = ("python.loop_blocked", "engine.cpu_bound_step", "net.transport")
    fix = "Try more front-end processes (--api-server-count), a fast tokenizer, or a larger stream interval."
    rank = 52
    states = frozenset({RUNNING})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what a loop thread runs while it is saturated; long single goes are ``python.loop_blocked``."""
        if segment.state != RUNNING or not ctx.serves(segment.tid):
            return None
        share = utilisation(segment.tid, ctx)
        if share < SATURATED or not ctx.loops(segment.tid):
            return None
        name = ctx.thread_label(segment.tid, segment.tgid)
        text = f"ran or was ready to {share:.0%} of the time"
        who = Culprit(kind="thread", name=name, tgid=segment.tgid, tid=segment.tid, detail=text)
        return Claim(self.id, f"front end's thread {text}", who)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how busy the front end's threads were."""
        tids = sorted({s.tid for s in path.segments if ctx.serves(s.tid)})
        most = max((utilisation(tid, ctx) for tid in tids), default=0.0)
        told = f"the front end's busiest thread ran or was ready to {most:.0%} of the time"
        if most < SATURATED:
            return f"{told}, less than {SATURATED:.0%}"
        return f"{told}, but its time on the path is another cause's, or it runs no event loop"


RULE = _FrontendSaturated()
