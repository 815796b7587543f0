"""``python.pool_exhausted``: the request waited for a free thread or connection of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes import pools, pools_connections
from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, Stretches, tidy
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.timeline import RUNNING, UNKNOWN_STATE


class _PoolExhausted:
    id = "python.pool_exhausted"
    title = "waiting for a free slot of a pool"
    neighbours = ("net.connection_setup", "engine.queueing", "python.loop_blocked")
    fix = (
        "Try a larger pool, and look at what holds its slots: a slow upstream, jobs that wait; reuse connections "
        "rather than opening more."
    )
    rank = 47

    def waits(self, ctx: Context) -> Stretches:
        """Return the request's waits for a slot."""
        return ctx.memo(self.id, lambda: tidy(_waits(ctx)))

    def applies(self, ctx: Context) -> bool:
        """Return whether there is any."""
        return bool(self.waits(ctx))

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what the path has of such a wait: others' work on a slot, or nothing at all.

        What the thread that serves the request runs meanwhile is its own.
        """
        # Threads that all wait for one lock are no pool that is too small: it is the lock's holder that is named.
        if segment.state == UNKNOWN_STATE or segment.via is not None:
            return None
        engine = ctx.engine
        if engine is not None and engine.core and engine.anonymous and engine.behind:
            return None  # the pool is the engine's: its steps tell whose it waited for
        r = ctx.request
        if segment.state == RUNNING and segment.tid == r.start_tid and segment.start_ns >= r.recv_ns:
            return None
        d = self.waits(ctx).first(segment.start_ns, segment.end_ns)
        if d is None:
            return None
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, d.inferred, start_ns=lo, end_ns=hi)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how long it waited for a slot."""
        found = self.waits(ctx)
        if not found:
            return _NOTHING
        total = sum(d.end_ns - d.start_ns for d in found) / MS
        return f"waited {total:.1f} ms for a slot, off the path or another cause's"


def _waits(ctx: Context) -> Iterable[During]:
    yield from pools.server_threads(ctx)
    yield from pools.worker_threads(ctx)
    yield from pools_connections.connections(ctx)


_NOTHING: Final = (
    "no thread or connection went from another request's work to this one's after it had been handed over"
)
RULE = _PoolExhausted()
