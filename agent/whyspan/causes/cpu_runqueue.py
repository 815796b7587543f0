"""``cpu.runqueue``: another process, or an interrupt, had the CPU while the thread was ready to run, or running."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, Stretches, tidy
from whyspan.causes.rule import LONG_WAIT, Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.syscalls import SEND
from whyspan.timeline import RUNNABLE, RUNNING, WAKEUP

#: Soft interrupts by vector. Source: include/linux/interrupt.h
VECTORS: Final = {2: "NET_TX", 3: "NET_RX", 4: "BLOCK", 5: "IRQ_POLL", 6: "TASKLET"}
_KERNEL_THREADS: Final = {
    "ksoftirqd": "soft interrupts of this CPU: network, timers, block I/O",
    "kworker": "work queue of the kernel",
    "migration": "moves threads between CPUs",
    "rcu": "the kernel's own upkeep",
}

#: Shorter waits are ordinary scheduling: about one slice of the default scheduler (base_slice_ns, 0.7-3 ms).
LONG_WAIT_NS: Final = 1_000_000


def waits_long(segment: PathSegment) -> bool:
    """Return whether the segment is part of a wait for a CPU worth a cause."""
    return segment.state in (RUNNABLE, WAKEUP) and segment.whole_ns >= LONG_WAIT_NS


class _CpuRunqueue:
    id = "cpu.runqueue"
    title = "waiting for a CPU that another process used"
    neighbours = ("cpu.throttled", "cpu.oversubscribed", "io.log_blocked")
    fix = (
        "Try moving the other process away: another host, a cpuset, or a lower CPU weight than the server's; "
        "or isolate cores for the server."
    )
    rank = 30
    states = frozenset({RUNNABLE, WAKEUP, RUNNING})
    needs = frozenset({LONG_WAIT})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a long wait for a CPU that a process outside the service used, and what interrupts took."""
        if segment.state == RUNNING:
            return self._stolen(segment, ctx)
        if not waits_long(segment):
            return None
        rival = ctx.rival(segment)
        if rival is None or rival.tgid in ctx.service_tgids:
            return None
        name = ctx.process_label(rival.tgid, rival.tid)
        detail = _KERNEL_THREADS.get(name.partition("/")[0].partition("_")[0]) or ctx.where(rival.tgid)
        return Claim(
            self.id,
            f"CPU used by {name} ({rival.tgid})",
            Culprit(kind="process", name=name, tgid=rival.tgid, detail=detail),
        )

    def _stolen(self, segment: PathSegment, ctx: Context) -> Claim | None:
        if not ctx.memo("stolen", lambda: len(ctx.timelines.select("sched_stolen")) > 0):
            return None
        d = _stretches(segment.tid, ctx).first(segment.start_ns, segment.end_ns)
        if d is None:
            return None
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, d.inferred, start_ns=lo, end_ns=hi)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the long waits for a CPU and how many of them were other processes' doing."""
        waits = [s for s in path.segments if waits_long(s)]
        if not waits:
            total = path.ns(RUNNABLE, WAKEUP) / MS
            return f"no wait for a CPU of 1 ms or more on the path (all waits together {total:.1f} ms)"
        others = sum(s.ns for s in waits if self.match(s, ctx)) / MS
        total = sum(s.ns for s in waits) / MS
        return f"long waits for a CPU {total:.1f} ms, of which behind other processes {others:.1f} ms"


def _stretches(tid: int, ctx: Context) -> Stretches:
    """Return what soft interrupts took from a thread: about, since whole ticks are counted.

    What its own sending set off on the spot, as over the loopback, is its own work.
    """

    def find() -> list[During]:
        found: list[During] = []
        rows = ctx.timelines.rows_of(tid, "sched_stolen")
        for ts, vec, ns, nr in zip(
            *(rows[n].tolist() for n in ("ts_ns", "aux", "stolen_ns", "syscall_nr")), strict=True
        ):
            if nr in SEND:
                continue
            name = f"soft interrupt {VECTORS.get(vec, vec)}"
            who = Culprit(kind="process", name=name, detail="the kernel's, on top of the thread")
            found.append(During(ts - ns, ts, f"CPU used by {name}", who, True))
        return found

    return ctx.memo(("stolen", tid), lambda: tidy(find()))


RULE = _CpuRunqueue()
