"""``cpu.power``: the CPU had to leave a deep idle state first, or ran below its base frequency.

Virtual machines have neither: tested on made-up events only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from whyspan.causes.context import Context
from whyspan.causes.during import During
from whyspan.causes.on_thread import OnThreadRule
from whyspan.model import Culprit
from whyspan.timeline import RUNNABLE, RUNNING, WAKEUP

#: From a wake-up to running on an idle CPU: shorter is what any idle state costs. C6 takes 50-200 us to leave.
LONG_EXIT_NS: Final = 50_000
#: A wake-up, and the state left for it, are one when they lie this close together.
_NEAR_NS: Final = 100_000


class _Power(OnThreadRule):
    id = "cpu.power"
    title = "for a CPU to leave a deep idle state, or on one below its base frequency"
    neighbours = ("cpu.runqueue", "cpu.throttled")
    fix = (
        "Try a cap on idle states (PM QoS, /dev/cpu_dma_latency, intel_idle.max_cstate), the performance governor, and "
        "a look at power and thermal limits."
    )
    rank = 29
    events = ("power_woken", "power_frequency")
    nothing = "no thread was woken on a CPU in a deep idle state, and no CPU is seen below its base frequency"
    states = frozenset({WAKEUP, RUNNABLE, RUNNING})

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Yield the wake-ups that waited for an idle CPU, and the share of running time that a slow CPU took."""
        thread = ctx.timelines.thread(tid)
        states = ctx.facts.observers.host.idle_states
        rows = ctx.timelines.rows_of(tid, "power_woken")
        for ts, cpu, state in zip(*(rows[n].tolist() for n in ("ts_ns", "cpu", "aux")), strict=True):
            waited = thread.before(ts)
            if waited.state == RUNNING and ts - waited.start_ns <= _NEAR_NS:
                waited = thread.before(waited.start_ns)  # this record may come after the switch
            until = thread.next_in(waited.start_ns)
            if waited.state != WAKEUP or until is None or until - waited.start_ns < LONG_EXIT_NS:
                continue
            name, us = states[state] if state < len(states) else (f"state {state}", 0)
            detail = f"idle in {name}" + (f", which takes {us} us to leave" if us else "")
            yield During(waited.start_ns, until, detail, Culprit(kind="cpu", name=str(cpu), detail=detail))
        yield from self._slow(tid, ctx)

    @staticmethod
    def _slow(tid: int, ctx: Context) -> Iterable[During]:
        base = ctx.facts.observers.host.base_khz
        rows = ctx.timelines.select("power_frequency")
        if not base or not len(rows):
            return
        changes = {cpu: rows[rows["aux"] == cpu] for cpu in np.unique(rows["aux"]).tolist()}
        for at in ctx.timelines.rows_of(tid, "sched_switch_in"):
            start, cpu = int(at["ts_ns"]), int(at["cpu"])
            mine = changes.get(cpu)
            k = int(mine["ts_ns"].searchsorted(at["ts_ns"], "right")) - 1 if mine is not None else -1
            if mine is None or k < 0 or int(mine["khz"][k]) >= base:
                continue
            khz = int(mine["khz"][k])
            end = ctx.timelines.thread(tid).next_out(start) or ctx.timelines.end_ns
            if k + 1 < len(mine):
                end = min(end, int(mine["ts_ns"][k + 1]))
            lost = int((end - start) * (1 - khz / base))
            detail = f"{khz // 1000} MHz, {khz / base:.0%} of its base frequency"
            if lost > 0:
                yield During(end - lost, end, detail, Culprit(kind="cpu", name=str(cpu), detail=detail), True)


RULE = _Power()
