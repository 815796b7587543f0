"""``observer.tracer``: a tracing, security or profiling tool, our own agent included, took the time."""

from __future__ import annotations

from typing import Final

from whyspan.causes import engine_frozen as frozen
from whyspan.causes.context import MS, Context
from whyspan.causes.cpu_runqueue import waits_long
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
            return None
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

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how much of the waits for a CPU was behind tools, and that no thread was stopped."""
        stopped = sum(s.ns for s in path.segments if s.wait is not None and s.wait.prev_state & STOPPED)
        behind = sum(s.ns for s in path.segments if s.state != BLOCKED and self.match(s, ctx))
        return (
            f"threads of the path stopped by a tracer or signal {stopped / MS:.1f} ms; "
            f"waits for a CPU behind known tools {behind / MS:.1f} ms"
        )


def _culprit(tgid: int, name: str, detail: str, ctx: Context) -> Culprit:
    where = ctx.where(tgid)
    return Culprit(kind="process", name=name, tgid=tgid, detail=f"{detail}, {where}" if where else detail)


RULE = _Tracer()
