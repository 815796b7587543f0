"""``engine.straggler``: one worker of several began its part of the step late, and the others waited for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, DuringRule
from whyspan.engines import EngineView
from whyspan.engines.records import StepRun
from whyspan.model import Culprit

MIN_NS: Final = 1_000_000
#: So much later than the others' median, as a share of the step.
SHARE: Final = 0.2


def late(step: StepRun) -> tuple[int, int, int, int] | None:
    """Return (from, to, tgid, tid) of the wait for the last worker to begin; None when they began together."""
    begins: dict[tuple[int, int], int] = {}
    for e in step.executions:
        key = e.tgid, e.tid
        begins[key] = min(begins.get(key, e.begin_ns), e.begin_ns)
    if len(begins) < 2:
        return None
    ordered = sorted((t, who) for who, t in begins.items())
    before, (last, (tgid, tid)) = ordered[-2][0], ordered[-1]
    wall = step.wall_ns or max(last - step.begin_ns, 1)
    return (before, last, tgid, tid) if last - before >= max(MIN_NS, int(SHARE * wall)) else None


class _Straggler(DuringRule):
    id = "engine.straggler"
    title = "waiting for the rank that came last"
    neighbours = ("net.transport", "python.gc", "gpu.clocks")
    fix = "Try finding what held that rank up (its own host's load, its input) before looking at the collective."
    rank = 67
    nothing = "all workers began their part of each step together, or there is only one"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield, per step, from when all others had begun to when the last one did."""
        for step in engine.mine:
            found = late(step)
            if found is not None:
                lo, hi, tgid, tid = found
                name = ctx.thread_label(tid, tgid)
                yield During(
                    lo,
                    hi,
                    f"rank began {(hi - lo) / MS:.1f} ms after the others",
                    Culprit(kind="thread", name=name, tgid=tgid, tid=tid, detail="the last rank to begin"),
                )


RULE = _Straggler()
