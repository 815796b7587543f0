"""What the rules of memory share: stretches in which a thread freed memory, and sizes in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Final, NamedTuple

from whyspan.causes.context import Context
from whyspan.causes.cpu_runqueue import waits_long
from whyspan.causes.during import During
from whyspan.causes.on_thread import OnThreadRule
from whyspan.causes.rule import LONG_WAIT, Claim
from whyspan.critical_path import PathSegment
from whyspan.model import Culprit, MemoryUser
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, WAKEUP

_US: Final = 1_000
_HIGH: Final = 0x100  # of aux: the limit is memory.high
_TELLING_MS: Final = 1


class Stretch(NamedTuple):
    """One record of a thread in reclaim. ``limit_pages`` 0: not of a cgroup."""

    end_ns: int
    busy_ns: int
    calls: int
    pages: int
    cgroup_id: int
    limit_pages: int
    throttled_ms: int
    high: bool


class ReclaimRule(OnThreadRule):
    """Base of the rules over ``direct_reclaim``, ``memcg_reclaim`` and ``compaction``.

    Calls that follow each other closely are one record with pauses in it: only the time within them is claimed.
    """

    what: ClassVar[str]  # a call, in words
    states: ClassVar[frozenset[str]] = frozenset({RUNNING, BLOCKED, RUNNABLE, WAKEUP})
    needs: ClassVar[frozenset[str]] = frozenset({LONG_WAIT})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what the thread spent in reclaim, and a long wait for a CPU that siblings spent there."""
        if segment.state in (RUNNABLE, WAKEUP):
            return self._behind(segment, ctx)
        return super().match(segment, ctx)

    def _behind(self, segment: PathSegment, ctx: Context) -> Claim | None:
        # Siblings that use the CPU only to free memory do not want it for too much work: the limit holds both up.
        rival = ctx.rival(segment) if waits_long(segment) else None
        if rival is None or rival.tgid not in ctx.service_tgids:
            return None
        start, end = segment.start_ns, segment.end_ns
        total = longest = by = 0
        culprit: Culprit | None = None
        for (tid, tgid), ns in ctx.timelines.occupancy(rival.cpu, start, end).items():
            if tid == segment.tid or tgid not in ctx.service_tgids:
                continue
            inside = [d for d in self.stretches(tid, tgid, ctx) if d.end_ns > start and d.start_ns < end]
            busy = min(ns, sum(min(d.end_ns, end) - max(d.start_ns, start) for d in inside))
            total += busy
            if busy > longest:
                longest, by, culprit = busy, tid, inside[0].culprit
        if total <= segment.ns // 2:
            return None
        name = ctx.thread_label(by, rival.tgid)
        share = round(100 * total / segment.ns)
        return Claim(
            self.id,
            f"{share}% of a wait for a CPU behind siblings in {self.what}, mostly {name} ({by})",
            culprit,
            inferred=True,
        )

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Yield as much of the end of each record as was spent in reclaim."""
        for name in self.events:
            rows = ctx.timelines.rows_of(tid, name)
            for row in rows.tolist():
                r = dict(zip(rows.dtype.names or (), row, strict=True))
                stretch = Stretch(
                    r["ts_ns"],
                    r["busy_us"] * _US,
                    r["calls"],
                    r["pages"],
                    r["cgroup_id"],
                    r["limit_pages"],
                    r["throttled_ms"],
                    bool(r["aux"] & _HIGH),
                )
                start = max(r["begin_ns"], stretch.end_ns - stretch.busy_ns)
                yield During(start, stretch.end_ns, self._detail(stretch), self.culprit(stretch, tgid, ctx))

    def _detail(self, s: Stretch) -> str:
        freed = f", {s.pages} pages freed" if s.pages else ", nothing freed"
        asleep = f", {s.throttled_ms} ms of it asleep, reclaim being throttled" if s.throttled_ms else ""
        return f"{self.what}{freed if s.pages or not self.frees_nothing else ''}{asleep}"

    #: Whether a call frees no pages by its nature.
    frees_nothing: ClassVar[bool] = False

    def culprit(self, stretch: Stretch, tgid: int, ctx: Context) -> Culprit:
        """Return who is to blame for a stretch; the same for all stretches with the same reason."""
        raise NotImplementedError


def size(n: int) -> str:
    """Return a number of bytes in words."""
    if n >= 1 << 30:
        return f"{n / (1 << 30):.1f} GiB"
    return f"{n / (1 << 20):.0f} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def most(users: list[MemoryUser]) -> str:
    """Return who uses most memory, in words; empty when nobody is known."""
    if not users:
        return ""
    u = users[0]
    return f"most of it in process {u.comm} ({u.tgid}), {size(u.rss_bytes)} of its own"
