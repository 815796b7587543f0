"""``observer.tracer``: a tracing, security or profiling tool, our own agent included, took the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from whyspan.causes import engine_frozen as frozen
from whyspan.causes.context import MS, Context
from whyspan.causes.cpu_runqueue import waits_long
from whyspan.causes.during import During, tidy
from whyspan.causes.rule import Claim
from whyspan.critical_path import STOPPED, Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, RUNNABLE, TASK, WAKEUP

#: Names of processes (15 bytes) that trace, profile or police others.
TOOLS: Final = frozenset(
    {
        "auditd",
        "audit2rbac",
        "beyla",
        "bpftrace",
        "clamd",
        "clamscan",
        "dtrace",
        "ebpf-profiler",
        "falco",
        "falcon-sensor",
        "freshclam",
        "gdb",
        "gdbserver",
        "hubble",
        "inspektor-gadge",
        "kauditd",
        "lldb",
        "lldb-server",
        "ltrace",
        "mdatp",
        "ncu",
        "nsys",
        "opensnoop",
        "osqueryd",
        "parca-agent",
        "perf",
        "process-agent",
        "py-spy",
        "pyroscope",
        "rbspy",
        "rr",
        "samply",
        "security-agent",
        "stap",
        "stapio",
        "strace",
        "sysdig",
        "system-probe",
        "tcpdump",
        "tetragon",
        "trace-cmd",
        "tracee",
        "uftrace",
        "vtune",
        "wazuh-agentd",
        "wdavdaemon",
    }
)
_TRACED: Final = 0x0008  # __TASK_TRACED. Source: include/linux/sched.h
#: A tracer that looks at each system call stops for some 10 us; one that holds a process, for longer than this.
_FELT_NS: Final = 5_000_000
_MAX_STOPS: Final = 2000


def tool(tgid: int, tid: int, ctx: Context) -> str:
    """Return the name of a process that observes others, empty if it is none."""

    def look() -> str:
        ours = ctx.facts.observers.own(tgid)
        if ours:
            return ours
        fact = ctx.facts.process(tgid)
        names = [fact.comm, fact.exe] if fact is not None else []
        return next((n for n in [*names, ctx.facts.comm(tgid, tid)] if n in TOOLS), "")

    return ctx.memo(("tool", tgid), look) if tgid else ""


class _Tracer:
    id = "observer.tracer"
    title = "for a tracing, security or profiling tool"
    neighbours = ("cpu.runqueue", "python.loop_blocked", "lock.contention")
    fix = (
        "Try detaching the tool, fewer events or system calls in its mask, a lower sampling rate, or a CPU of its own "
        "for it; for whyspan itself a smaller budget_core_ratio."
    )
    rank = 5
    states = frozenset({RUNNABLE, WAKEUP, BLOCKED})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a stop by a tracer or signal, and a wait for a CPU that a known tool had."""
        if segment.state == BLOCKED:
            return self._stopped(segment, ctx)
        seen = segment.rival
        if segment.state not in (RUNNABLE, WAKEUP) or seen is None:
            return None
        # A tool that steps in often costs many short waits; only of the long ones is it worth asking who ran most.
        rival = ctx.rival(segment) if waits_long(segment) else seen
        if rival is None or rival.tgid in ctx.service_tgids:
            return None
        name = tool(rival.tgid, rival.tid, ctx)
        if not name:
            return None
        return Claim(
            self.id, f"CPU used by {name} ({rival.tgid})", _culprit(rival.tgid, name, "had the CPU", ctx)
        )

    def _stopped(self, segment: PathSegment, ctx: Context) -> Claim | None:
        wait = segment.wait
        if wait is None or not wait.prev_state & STOPPED:
            return self._beside(segment, ctx)
        traced = bool(wait.prev_state & _TRACED)
        if not traced and frozen.RULE.applies(ctx) and frozen.RULE.match(segment, ctx) is not None:
            return (
                None  # so long that the engine made no progress: that it was, under a green health, is more
            )
        how = "stopped by a tracer" if traced else "stopped by a signal"
        tracer = ctx.facts.observers.tracer(segment.tid) if traced else None
        if tracer is not None:
            name = tracer.comm or ctx.process_label(tracer.tracer_tgid)
            return Claim(self.id, how, _culprit(tracer.tracer_tgid, name, how, ctx))
        if wait.context == TASK and wait.waker_tgid:
            # Whoever lets a thread go on is who had stopped it, for all that can be seen.
            name = ctx.process_label(wait.waker_tgid, wait.waker_tid)
            return Claim(self.id, how, _culprit(wait.waker_tgid, name, f"{how}, which it ended", ctx))
        return Claim(self.id, how, Culprit(kind="process", name="not seen", detail=how), inferred=True)

    def _beside(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim of a wait what it has of a tracer's stop of the service's other threads: nothing could come from them.

        Of a thread that polls with a timer no wake-up tells whom it waited for.
        """
        found = ctx.memo((self.id, "stops"), lambda: tidy(_stops(ctx)))
        stop = found.first(segment.start_ns, segment.end_ns)
        if stop is None:
            return None
        lo, hi = max(stop.start_ns, segment.start_ns), min(stop.end_ns, segment.end_ns)
        return Claim(self.id, stop.detail, stop.culprit, inferred=True, start_ns=lo, end_ns=hi)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how much of the waits for a CPU was behind tools, and that no thread was stopped."""
        stopped = sum(s.ns for s in path.segments if s.wait is not None and s.wait.prev_state & STOPPED)
        behind = sum(s.ns for s in path.segments if s.state != BLOCKED and self.match(s, ctx))
        return (
            f"threads of the path stopped by a tracer or signal {stopped / MS:.1f} ms; "
            f"waits for a CPU behind known tools {behind / MS:.1f} ms"
        )


def _stops(ctx: Context) -> Iterator[During]:
    """Yield when a tracer held threads of the service, long enough to be felt."""
    outs = ctx.timelines.select("sched_switch_out")
    held = np.flatnonzero((outs["aux"] & _TRACED) != 0)[:_MAX_STOPS]
    for tid, tgid, since in zip(*(outs[n][held].tolist() for n in ("tid", "tgid", "ts_ns")), strict=True):
        tracer = ctx.facts.observers.tracer(tid)
        if tgid not in ctx.service_tgids or tracer is None:
            continue
        until = ctx.timelines.thread(tid).next_in(since) or ctx.request.end_ns
        if until - since >= _FELT_NS:
            name = tracer.comm or ctx.process_label(tracer.tracer_tgid)
            text = f"{ctx.thread_label(tid, tgid)} ({tid}), stopped by a tracer meanwhile"
            who = _culprit(tracer.tracer_tgid, name, "stopped the threads it waited for", ctx)
            yield During(since, until, text, who, True)


def _culprit(tgid: int, name: str, detail: str, ctx: Context) -> Culprit:
    where = ctx.where(tgid)
    return Culprit(kind="process", name=name, tgid=tgid, detail=f"{detail}, {where}" if where else detail)


RULE = _Tracer()
