"""``net.accept_overflow``: the request's connection waited to be accepted while the listen queue was full."""

from __future__ import annotations

from typing import Final

import numpy as np
from whyspan_probes.schema import Events

from whyspan.causes.context import MS, Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit

#: Full so shortly before the request arrived: its connection joined a moment earlier (a slow client's round trip), and
#: whoever joins when a place has just come free waits behind those that filled the queue. Clients that were refused
#: come back after 1 s and 3 s (TCP_TIMEOUT_INIT, doubled; source: include/net/tcp.h): a queue overflows in waves.
JOINED_NS: Final = 3_000_000_000
_SYN: Final = 4  # aux of tcp_retransmit
_NOTHING: Final = "the listen queue was not seen full"


class _AcceptOverflow:
    """From when the request reached its connection to when a process read it, of a connection's first request, if the
    listening socket's queue was full meanwhile.

    A client whose SYN was refused because the queue was full tries again after 1, 2, 4... s: that lies before the
    connection and the request that the server knows of, and outside the interval that is explained. What the kernel
    tells of it (refusals of the listening socket; SYN-ACKs sent again; the client's SYNs, if it is on this host) goes
    into the evidence, or into the check where the interval holds nothing.
    """

    id = "net.accept_overflow"
    title = "in a full listen queue, not accepted yet"
    neighbours = (
        "python.frontend_saturated",
        "python.loop_blocked",
        "python.pool_exhausted",
        "client.artifact",
    )
    fix = (
        "Try a larger backlog (the server's option and net.core.somaxconn), more processes that accept, or accepting "
        "on a thread that does nothing else; look at what kept it."
    )
    rank = 37

    def applies(self, ctx: Context) -> bool:
        """Return whether the queue was full while the request waited in it."""
        return self._since(ctx) > 0

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what lies between the arrival and the first read, whatever was done instead."""
        since, until = self._since(ctx), ctx.request.recv_ns
        lo, hi = max(segment.start_ns, since), min(segment.end_ns, until)
        if not since or lo >= hi:
            return None
        told, who = ctx.memo((self.id, "who"), lambda: self._who(ctx))
        return Claim(self.id, told, who, start_ns=lo, end_ns=hi)

    def _since(self, ctx: Context) -> int:
        """From when the request waited while the queue was full; 0: it did not."""

        def look() -> int:
            r, rows = ctx.request, self._full(ctx)
            if r.seq or not r.recv_ns > r.start_ns:
                return 0
            ts = rows["ts_ns"]
            during = ts[(ts >= np.uint64(max(r.start_ns - JOINED_NS, 0))) & (ts <= np.uint64(r.recv_ns))]
            return max(int(during[0]), r.start_ns) if len(during) else 0

        return ctx.memo(self.id, look)

    @staticmethod
    def _full(ctx: Context) -> Events:
        """What was told of the listening socket while its queue was full, lately."""
        since = ctx.request.start_ns - JOINED_NS
        return ctx.timelines.keyed_since("accept_queue", "lport", ctx.request.server_port, since)

    def _who(self, ctx: Context) -> tuple[str, Culprit]:
        r, rows = ctx.request, self._full(ctx)
        worst = rows[int(rows["backlog"].argmax())]
        told = (
            f"port {r.server_port}: {int(worst['backlog'])} connections waited to be accepted, the limit is "
            f"{int(worst['limit'])}; {self._before(ctx)}"
        )
        return told, Culprit(kind="process", name=ctx.process_label(r.tgid), tgid=r.tgid, detail=told)

    def _before(self, ctx: Context) -> str:
        """What was lost before the request's interval, in words."""
        r, rows = ctx.request, self._full(ctx)
        drops = int(rows["drops"].max() - rows["drops"].min()) if len(rows) else 0
        parts = [f"{drops} connections refused lately"]
        syns = ctx.timelines.keyed("tcp_retransmit", "lport", r.client_port)
        if n := int(((syns["rport"] == r.server_port) & (syns["aux"] == _SYN)).sum()) if len(syns) else 0:
            parts.append(f"this one's SYN was sent again {n} times before")
        acks = ctx.timelines.keyed("tcp_synack", "rport", r.client_port)
        if n := int((acks["lport"] == r.server_port).sum()) if len(acks) else 0:
            parts.append(f"its SYN-ACK {n} times")
        return ", ".join(parts)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how full the queue was, and what happened before the request arrived."""
        if not len(self._full(ctx)):
            return _NOTHING
        waited = max(ctx.request.recv_ns - ctx.request.start_ns, 0) / MS
        return (
            f"unread for {waited:.1f} ms; the listen queue was full beside the request; {self._before(ctx)}"
        )


RULE = _AcceptOverflow()
