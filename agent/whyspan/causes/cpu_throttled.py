"""``cpu.throttled``: the cgroup's CPU quota was used up."""

from __future__ import annotations

from whyspan.causes.context import MS, Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import CgroupFact, Culprit
from whyspan.timeline import THROTTLED


class _CpuThrottled:
    id = "cpu.throttled"
    title = "waiting for CPU quota"
    neighbours = ("cpu.oversubscribed", "cpu.runqueue", "cpu.power")
    fix = (
        "Try raising or dropping the cgroup's CPU limit (cpu.max), or size the thread pools "
        "(OMP_NUM_THREADS, workers) to the quota."
    )
    rank = 10
    states = frozenset({THROTTLED})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim time the scheduler spent with the thread's group throttled."""
        if segment.state != THROTTLED:
            return None
        quota = ctx.facts.quota(segment.tgid)
        if quota is None:
            path = ctx.facts.cgroup(segment.tgid)
            return Claim(
                self.id, "", Culprit(kind="cgroup", name=path or "cgroup not known", tgid=segment.tgid)
            )
        return Claim(
            self.id,
            f"{quota.path}: {describe(quota)}",
            Culprit(kind="cgroup", name=quota.path, tgid=segment.tgid, detail=describe(quota)),
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the throttled time on the path."""
        quota = ctx.facts.quota(ctx.request.tgid)
        limit = f"quota {describe(quota)}" if quota is not None else "no CPU quota known"
        return f"throttled time on the path {path.ns(THROTTLED) / MS:.1f} ms; {limit}"


def describe(quota: CgroupFact) -> str:
    """Return a quota in words: CPUs and the period."""
    cpus = quota.quota_us / max(quota.period_us, 1)
    return f"{cpus:.2f} CPUs ({quota.quota_us} µs every {quota.period_us} µs)"


RULE = _CpuThrottled()
