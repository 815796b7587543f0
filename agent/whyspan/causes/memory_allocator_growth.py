"""``memory.allocator_growth``: malloc's arenas keep what was freed. Slow only by what it leads to: reclaim, OOM."""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan.causes.context import Context
from whyspan.causes.reclaiming import size
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.memory import Memory
from whyspan.model import Culprit, MemoryFact

#: Heaps of arenas that are many. glibc makes up to eight arenas per CPU, each begins with one heap of 64 MiB.
MANY_HEAPS: Final = 8
#: They hold at least this share of the process's anonymous memory.
HEAPS_SHARE: Final = 0.4
#: Growth within the history that counts: of so much, and by such a share.
GROWTH_BYTES: Final = 64 << 20
GROWTH_SHARE: Final = 0.2
_LEADS_TO: Final = frozenset({"memory.reclaim", "memory.cgroup_limit", "memory.swap", "memory.oom"})


class Growth(NamedTuple):
    """How a process's anonymous memory grew over its samples."""

    before: MemoryFact
    now: MemoryFact

    @property
    def grown_bytes(self) -> int:
        """By how much."""
        return self.now.anon_bytes - self.before.anon_bytes

    @property
    def by_arenas(self) -> bool:
        """Whether it grew, and many arenas hold much of it."""
        return (
            self.now.heaps >= MANY_HEAPS
            and self.now.heap_bytes >= HEAPS_SHARE * self.now.anon_bytes
            and self.grown_bytes >= max(GROWTH_BYTES, GROWTH_SHARE * self.before.anon_bytes)
        )

    def __str__(self) -> str:
        """Return it in words."""
        minutes = (self.now.ts_ns - self.before.ts_ns) / 60e9
        arenas = (
            f", {self.now.heaps} heaps of malloc arenas hold {size(self.now.heap_bytes)}"
            if self.now.heaps
            else ""
        )
        before, now = size(self.before.anon_bytes), size(self.now.anon_bytes)
        return f"anonymous memory {before} to {now} in {minutes:.0f} min{arenas}"


def growth(memory: Memory, tgid: int) -> Growth | None:
    """Return the growth of a process from its least sample on; None where less than two are known."""
    samples = memory.history(tgid)
    if len(samples) < 2:
        return None
    least = min(samples[:-1], key=lambda s: s.anon_bytes)
    return Growth(least, samples[-1])


class _AllocatorGrowth:
    id = "memory.allocator_growth"
    title = "in a process whose malloc arenas keep growing"
    neighbours = ("engine.prefix_miss", "engine.kv_preemption", "memory.cgroup_limit")
    fix = (
        "Try MALLOC_ARENA_MAX=2 in the environment of the process named, jemalloc or tcmalloc, or malloc_trim now and "
        "then; whether the memory is live or only kept, an allocation profile tells."
    )
    rank = 19
    states: frozenset[str] = frozenset()

    def applies(self, ctx: Context) -> bool:
        """No time of a path is its own."""
        return False

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim nothing."""
        return None

    def led_to(self, cause: str, ctx: Context) -> Claim | None:
        """Tell of arenas that grew, where memory ran short. Whether what they hold is live is not known: inferred."""
        if cause not in _LEADS_TO:
            return None
        found = [
            (g.grown_bytes, t, g)
            for t in ctx.service_tgids
            if (g := growth(ctx.facts.memory, t)) and g.by_arenas
        ]
        if not found:
            return None
        _, tgid, g = max(found)
        who = Culprit(kind="process", name=ctx.process_label(tgid), tgid=tgid, detail=str(g))
        return Claim(self.id, f"{who.name} ({tgid}): {g}", who, inferred=True)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the growth of the process that serves the request."""
        g = growth(ctx.facts.memory, ctx.request.tgid)
        return str(g) if g is not None else "the growth of its memory is not known yet"


RULE = _AllocatorGrowth()
