"""``memory.oom``: the kernel's out-of-memory killer ended a process that the request needed."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.memory_cgroup_limit import describe
from whyspan.causes.reclaiming import size
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.failures import DIED_BEFORE_NS
from whyspan.memory import Victim
from whyspan.model import Culprit, MemoryCgroupFact, MemoryUser, Request

_KILLED: Final = 9
_SIGNAL_BITS: Final = 0x7F
_SERVER_ERROR: Final = 500
_CLIENT: Final = frozenset({"client_close", "client_reset"})


class _Oom:
    id = "memory.oom"
    title = "until a process that it needed was killed by the out-of-memory killer"
    neighbours = ("memory.cgroup_limit", "memory.allocator_growth", "gpu.vram_spill")
    fix = (
        "Try raising the memory limit, or splitting it: a cgroup of its own for whoever filled it; a cap on batch, "
        "context and cache sizes; look for the leak in the process named."
    )
    rank = 2
    states: frozenset[str] = frozenset()

    def applies(self, ctx: Context) -> bool:
        """Nothing of a path is claimed: the request ends with the process."""
        return False

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim nothing."""
        return None

    def ended(self, ctx: Context) -> Claim | None:
        """Claim the failure of a request that ended with its process, or after another one of the service had."""
        found = ctx.memo((self.id, "ended"), lambda: _killed(ctx))
        if found is None:
            return None
        victim, died_ns = found
        r = ctx.request
        own = victim.tgid == r.tgid or (not victim.tgid and victim.tid == r.tgid)
        fact = ctx.facts.memory.cgroup(victim.cgroup_id)
        who = "it" if own else f"process {victim.tgid or victim.tid} ({_name(victim, ctx)})"
        when = (
            ""
            if own or died_ns >= r.start_ns
            else f" {(r.start_ns - died_ns) / MS:.0f} ms before the request"
        )
        left = r.ended_by in _CLIENT
        detail = (
            f"the out-of-memory killer chose {who}{when}, with {size(victim.rss_bytes)} resident; "
            f"{_full(victim, fact)}"
        )
        return Claim(self.id, detail, _culprit(victim, fact, ctx), inferred=bool(when) or left)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return whom the OOM killer chose beside the request."""
        r = ctx.request
        victims = ctx.facts.memory.victims(r.start_ns - DIED_BEFORE_NS, r.end_ns)
        if not victims:
            return "the out-of-memory killer chose nobody"
        v = victims[-1]
        service = ctx.facts.service(v.tgid) or "none that is watched"
        return f"the out-of-memory killer chose process {v.tgid or v.tid} ({_name(v, ctx)}), of service {service}"


def _killed(ctx: Context) -> tuple[Victim, int] | None:
    """Return the OOM kill that failed the request and when that process died."""
    r, memory = ctx.request, ctx.facts.memory
    if r.outcome == "error" and r.status < _SERVER_ERROR:
        return None  # the client's fault, or too many at a time
    if r.ended_by == "process_exit":
        if r.exit_code & _SIGNAL_BITS != _KILLED:
            return None
        victim = memory.killed(r.tgid, r.end_ns)
        return (victim, r.end_ns) if victim is not None else None
    in_vain = not r.status or r.status >= _SERVER_ERROR
    # Who left by itself may have left for any reason: then only what died meanwhile counts.
    before_ns = DIED_BEFORE_NS if in_vain and r.ended_by not in _CLIENT else 0
    for d in reversed(ctx.facts.deaths(r.service, r.start_ns - before_ns, r.end_ns)):
        if d.tgid == r.tgid or d.exit_code & _SIGNAL_BITS != _KILLED:
            continue
        victim = memory.killed(d.tgid, d.ts_ns)
        if victim is not None and (d.ts_ns >= r.start_ns or _close(d.ts_ns, r, ctx)):
            return victim, d.ts_ns
    return None


def _close(died_ns: int, r: Request, ctx: Context) -> bool:
    """Whether a process that died before the request may still be missed: nothing of the service was born since."""
    started = (ctx.facts.started_ns(t) for t in ctx.facts.tgids(r.service))
    return not any(died_ns < born <= r.start_ns for born in started)


def _name(victim: Victim, ctx: Context) -> str:
    return victim.name or ctx.process_label(victim.tgid, victim.tid)


def _full(victim: Victim, fact: MemoryCgroupFact | None) -> str:
    if fact is not None:
        return f"memory cgroup {fact.path} was full: {describe(fact)}"
    if victim.cgroup_id:
        return (
            f"its memory cgroup was full: limit {size(victim.limit_bytes)}, {size(victim.usage_bytes)} used"
        )
    return "the host's memory was full"


def _culprit(victim: Victim, fact: MemoryCgroupFact | None, ctx: Context) -> Culprit:
    """Name who filled the memory: the one with most of it, which the victim often is, but need not be."""
    tgid, name, rss = victim.tgid or victim.tid, _name(victim, ctx), victim.rss_bytes
    host = ctx.facts.memory.host
    users: list[MemoryUser] = (
        fact.users if fact is not None else host.users if host and not victim.cgroup_id else []
    )
    greatest = users[0] if users else None
    if greatest is not None and greatest.tgid != tgid and greatest.rss_bytes > rss:
        tgid, name, rss = greatest.tgid, greatest.comm, greatest.rss_bytes
    limit = f" of a limit of {size(victim.limit_bytes)}" if victim.limit_bytes else ""
    where = f" in memory cgroup {fact.path}" if fact is not None else ""
    return Culprit(kind="process", name=name, tgid=tgid, detail=f"{size(rss)} resident{limit}{where}")


RULE = _Oom()
