"""``net.dns``: the request waited for a name to be resolved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.causes.on_thread import OnThreadRule
from whyspan.causes.rule import Claim
from whyspan.causes.wire import by_network
from whyspan.critical_path import PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED

RESOLVER_PORT: Final = 53
#: A resolver that knows the answer takes less, all the request's questions together.
MIN_NS: Final = 5_000_000
#: glibc, musl and c-ares ask again after this long. Source: resolv.conf(5), `timeout`.
TIMEOUT_NS: Final = 5_000_000_000
_NEAR_TIMEOUT: Final = 0.98
_SOCKET: Final = 4  # aux of fd_block
_QUERY, _ANSWER, _LOCAL = 1, 2, 4  # aux of dns_message


class _Dns(OnThreadRule):
    """Waits in a call on a socket whose peer is port 53 (getaddrinfo sleeps in poll); and from a question to its
    answer on the thread that asks, for resolvers that live in an event loop.

    Not seen: resolvers that are asked over a unix socket (nscd, systemd's NSS module) or by datagrams on a socket that
    is not connected (musl).
    """

    id = "net.dns"
    title = "waiting for a name to be resolved"
    neighbours = ("net.connection_setup", "python.pool_exhausted", "python.loop_blocked")
    fix = (
        "Try a caching resolver on the node, fewer search domains (ndots), names that end in a dot, and connections "
        "that are kept; an offline mode for model hubs."
    )
    rank = 32
    events = ("fd_block", "dns_message")
    nothing = "no wait for a resolver on the path"
    states = frozenset({BLOCKED})

    def applies(self, ctx: Context) -> bool:
        """Return whether anybody waited for port 53 beside the request."""
        return len(ctx.timelines.select("dns_message")) > 0 or (
            len(ctx.timelines.keyed("fd_block", "rport", RESOLVER_PORT)) > 0
        )

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Return a thread's waits for a resolver beside the request, when they add up to something."""
        r = ctx.request
        spans = [
            (max(a, r.start_ns), min(b, r.end_ns))
            for a, b in (*self._blocked(tid, ctx), *self._asked(tid, ctx))
            if b > r.start_ns and a < r.end_ns
        ]
        longest = max((b - a for a, b in spans), default=0)
        if not spans or _covered(spans) < MIN_NS:
            return []
        told, local = self._told(tid, longest, len(spans), ctx)
        name = f"resolver at port {RESOLVER_PORT}{' on this host' if local else ''}"
        who = Culprit(kind="peer", name=name, detail=told)
        return [During(a, b, told, who) for a, b in spans]

    @staticmethod
    def _blocked(tid: int, ctx: Context) -> Iterable[tuple[int, int]]:
        rows = ctx.timelines.rows_of(tid, "fd_block")
        if not len(rows):
            return
        for row in rows[(rows["rport"] == RESOLVER_PORT) & (rows["aux"] == _SOCKET)]:
            at = int(row["ts_ns"])
            # The record of the descriptor may be a moment younger than that of the switch.
            yield at - MS, ctx.timelines.thread(tid).next_in(at) or ctx.request.end_ns

    @staticmethod
    def _asked(tid: int, ctx: Context) -> Iterable[tuple[int, int]]:
        rows = ctx.timelines.rows_of(tid, "dns_message")
        for cookie in np.unique(rows["cookie"]).tolist() if len(rows) else ():
            mine = rows[rows["cookie"] == cookie]
            asked = 0
            for ts, aux in zip(mine["ts_ns"].tolist(), mine["aux"].tolist(), strict=True):
                if aux & _ANSWER and asked:
                    yield asked, ts
                    asked = 0
                elif aux & _QUERY:
                    asked = asked or ts

    @staticmethod
    def _told(tid: int, longest: int, waits: int, ctx: Context) -> tuple[str, bool]:
        rows = ctx.timelines.rows_of(tid, "dns_message")
        inside = rows
        if len(rows):
            ts = rows["ts_ns"]
            inside = rows[(ts >= np.uint64(ctx.request.start_ns)) & (ts <= np.uint64(ctx.request.end_ns))]
        local = False
        text = f"{waits} waits"
        if len(inside):
            aux = inside["aux"]
            local = bool((aux & _LOCAL).any())
            text = f"{int((aux & _QUERY != 0).sum())} queries, {int((aux & _ANSWER != 0).sum())} answers"
        times = round(longest / TIMEOUT_NS)
        if times and longest >= times * TIMEOUT_NS * _NEAR_TIMEOUT:
            text += f", a wait of {times} x 5 s: the resolver's time-out"
        return text, local

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim such waits; on a loop's thread those that the network ended."""
        wait = segment.wait
        if wait is None:
            return None
        claim = super().match(segment, ctx)
        if claim is None or not ctx.loops(segment.tid) or segment.wait is None:
            return claim
        on_socket = wait.fd is not None and wait.fd.kind == _SOCKET
        return claim._replace(inferred=not on_socket) if on_socket or by_network(wait, ctx) else None


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    total, last = 0, 0
    for a, b in sorted(spans):
        total += max(b - max(a, last), 0)
        last = max(last, b)
    return total


RULE = _Dns()
