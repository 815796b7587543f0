"""Causes that are stretches of one thread's time: what it did, or was made to do, between two of its own events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, Stretches, tidy
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.timeline import BLOCKED, RUNNING


class OnThreadRule:
    """Base of the rules that claim by stretches of the thread that a segment is on.

    A subclass has ``id``, ``title``, ``neighbours``, ``fix``, ``rank``, and ``find``. ``events``: the kinds of record
    it needs; without any of them in the window it has nothing to say. ``nothing`` says in words what was looked for.
    ``states``: of the segments that it may claim; waits for a CPU are somebody else's doing.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    neighbours: ClassVar[tuple[str, ...]]
    fix: ClassVar[str]
    rank: ClassVar[int]
    events: ClassVar[tuple[str, ...]]
    nothing: ClassVar[str]
    states: ClassVar[frozenset[str]] = frozenset({RUNNING, BLOCKED})

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Return the stretches of a thread, in any order."""
        raise NotImplementedError

    def stretches(self, tid: int, tgid: int, ctx: Context) -> Stretches:
        """Return the stretches of a thread, in order and without overlap."""
        return ctx.memo((self.id, tid), lambda: tidy(self.find(tid, tgid, ctx)))

    def applies(self, ctx: Context) -> bool:
        """Return whether any of its events were seen beside the request."""
        return any(len(ctx.timelines.select(name)) for name in self.events)

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim the part of a segment that lies in a stretch of its thread."""
        if segment.state not in self.states:
            return None
        d = self.stretches(segment.tid, segment.tgid, ctx).first(segment.start_ns, segment.end_ns)
        if d is None:
            return None
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, d.inferred, start_ns=lo, end_ns=hi)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return what was looked for and how much of it there was."""
        if not self.applies(ctx):
            return self.nothing
        threads = {(s.tid, s.tgid) for s in path.segments}
        found = [d for tid, tgid in sorted(threads) for d in self.stretches(tid, tgid, ctx)]
        inside = [
            (max(d.start_ns, path.start_ns), min(d.end_ns, path.end_ns))
            for d in found
            if d.end_ns > path.start_ns and d.start_ns < path.end_ns
        ]
        if not inside:
            return self.nothing
        total = sum(hi - lo for lo, hi in inside) / MS
        return f"{total:.1f} ms of it on the path's threads, off the path or another cause's"
