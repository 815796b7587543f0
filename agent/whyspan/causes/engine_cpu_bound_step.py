"""``engine.cpu_bound_step``: the workers had nothing to do while the engine core prepared or finished a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, DuringRule
from whyspan.critical_path import PathSegment
from whyspan.engines import EngineView
from whyspan.model import Culprit
from whyspan.timeline import RUNNING

#: Shorter stretches are the ordinary price of a step.
MIN_NS: Final = 1_000_000


class _CpuBoundStep(DuringRule):
    id = "engine.cpu_bound_step"
    title = "in the engine core's own work between forward passes"
    neighbours = ("gpu.graph_miss", "gpu.implicit_sync", "cpu.throttled", "cpu.runqueue", "python.gc")
    fix = "Try asynchronous scheduling, fewer Python operations per step, or moving sampling to the device."
    rank = 72
    nothing = "the engine core took less than a millisecond per step between forward passes"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the core's scheduling and updating, where no worker ran and it took long."""
        for step in engine.steps:
            running = sorted((e.begin_ns, e.end_ns) for e in step.executions)
            if not running:
                continue
            for lo, hi, what in (
                (step.begin_ns, min(step.sent_ns or running[0][0], running[0][0]), "scheduling"),
                (max(step.got_ns, running[-1][1]), step.done_ns, "updating its state"),
            ):
                if hi - lo >= MIN_NS:
                    who = Culprit(
                        kind="thread",
                        name=ctx.thread_label(step.core_tid, step.core),
                        tgid=step.core,
                        tid=step.core_tid,
                        detail=f"{what}, {(hi - lo) / MS:.1f} ms in a step of {step.batch} requests",
                    )
                    yield During(lo, hi, f"engine core {what}", who)

    def takes(self, segment: PathSegment, ctx: Context) -> bool:
        """Take only work of the engine core on a CPU."""
        step = ctx.engine.step_at(segment.end_ns) if ctx.engine is not None else None
        return segment.state == RUNNING and step is not None and segment.tid == step.core_tid


RULE = _CpuBoundStep()
