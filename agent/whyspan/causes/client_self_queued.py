"""``client.self_queued``: the request waited with its sender, in a queue or admission gate of the sender's own."""

from __future__ import annotations

from whyspan.causes.context import MS, Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit, Request


class _SelfQueued:
    """Claims no part of a path: the time lies before it. The verdict sets it beside what happened here."""

    id = "client.self_queued"
    title = "before it arrived here"
    neighbours = ("client.artifact", "client.retry_storm", "engine.queueing")
    fix = (
        "Try measuring from when the request is sent; look at the queue or admission gate of the client, benchmark or "
        "proxy that sends it."
    )
    rank = 42
    states: frozenset[str] = frozenset()

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim nothing."""
        return None

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how long it waited with its sender."""
        waited = ctx.request.client_wait_ns / MS
        if waited > 0:
            return (
                f"it waited {waited:.1f} ms before it arrived, by its sender's clock, less than it lost here"
            )
        return "its head does not say that it waited before it arrived"


def sender_label(request: Request) -> str:
    """Return who sent a request, as far as its head and its connection tell."""
    if request.tenant:
        return f"tenant {request.tenant}"
    return request.agent or (f"port {request.client_port}" if request.client_port else "client")


def culprit(request: Request) -> Culprit:
    """Return the sender as the culprit."""
    return Culprit(kind="peer", name=sender_label(request), detail="its own queue, by its own clock")


RULE = _SelfQueued()
