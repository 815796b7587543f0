"""``net.connection_setup``: the request waited for a new connection, to be set up by TCP and perhaps TLS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from whyspan.causes.context import Context
from whyspan.causes.during import During
from whyspan.causes.net_dns import RESOLVER_PORT
from whyspan.causes.on_thread import OnThreadRule
from whyspan.causes.rule import Claim
from whyspan.causes.wire import by_network, peer, rests
from whyspan.critical_path import Path, PathSegment
from whyspan.timeline import BLOCKED
from whyspan.tls import handshakes

#: Less than this in a whole request is a near peer's round trip.
MIN_NS: Final = 2_000_000
_LOCAL: Final = 1  # aux of tcp_connect
_CONNECT: Final = 42


class _ConnectionSetup(OnThreadRule):
    """Waits inside connect, or in a poll for its end, on the thread that connects; and those in the TLS handshakes
    that it does as a client.

    One per request instead of a connection that is kept shows in the ratio of exchanges to connections.
    """

    id = "net.connection_setup"
    title = "setting up connections"
    neighbours = ("net.dns", "python.pool_exhausted", "net.transport", "python.loop_blocked")
    fix = (
        "Try to keep connections open and share the client among requests; of a slow answer to the SYN, look at the "
        "other side's listen queue."
    )
    rank = 33
    events = ("tcp_connect", "tls_handshake")
    nothing = "no connection was set up on the path"
    states = frozenset({BLOCKED})

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Return the connects and handshakes of a thread beside the request, when they add up to something."""
        found = [d for d in (*self._connects(tid, ctx), *self._handshakes(tid, ctx)) if _beside(d, ctx)]
        return found if sum(d.end_ns - d.start_ns for d in found) >= MIN_NS else []

    def _connects(self, tid: int, ctx: Context) -> Iterable[During]:
        for row in ctx.timelines.rows_of(tid, "tcp_connect"):
            port, end, again = int(row["rport"]), int(row["ts_ns"]), int(row["again"])
            if port == RESOLVER_PORT:
                continue
            local = bool(int(row["aux"]) & _LOCAL)
            syn = f", its SYN sent {again + 1} times" if again else ""
            failed = f", which failed (error {int(row['error'])})" if int(row["failed"]) else ""
            text = f"connection to port {port}{' on this host' if local else ''}{syn}{failed}"
            who = peer(0, port, ctx, self._reuse(port, ctx), local)
            yield During(end - int(row["duration_ns"]), end, text, who)

    @staticmethod
    def _handshakes(tid: int, ctx: Context) -> Iterable[During]:
        # Its own clients' lie before their requests, and are not this cause.
        for h in ctx.memo("handshakes", lambda: handshakes(ctx.timelines)):
            if h.tid == tid and h.as_server is not True and h.cookie != ctx.request.cookie:
                text = f"TLS handshake ({h.kind}) at port {h.remote_port}"
                yield During(h.start_ns, h.end_ns, text, peer(0, h.remote_port, ctx, text))

    @staticmethod
    def _reuse(port: int, ctx: Context) -> str:
        """Return how many exchanges the connections to a port carried, in words."""

        def count() -> str:
            rows = ctx.timelines.select("tcp_connect")
            made = int((rows["rport"] == port).sum())
            sent = ctx.timelines.keyed("sock_send", "rport", port)
            got = ctx.timelines.keyed("sock_recv", "rport", port)
            used = np.unique(sent["key"])
            turns = sum(_turns(sent["ts_ns"][sent["key"] == k], got["ts_ns"][got["key"] == k]) for k in used)
            return f"{made} connections set up lately for {turns} exchanges on {len(used)}"

        return ctx.memo(("reuse", port), count)

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim waits in connect, and others that the network ended; what a loop does for others is inferred."""
        wait = segment.wait
        if wait is None:
            return None
        resting = wait.syscall_nr != _CONNECT and rests(segment, ctx)
        if not (resting or wait.syscall_nr == _CONNECT or by_network(wait, ctx)):
            return None
        claim = super().match(segment, ctx)
        return claim._replace(inferred=True) if claim is not None and resting else claim

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how many connections the service set up meanwhile."""
        rows = ctx.timelines.select("tcp_connect")
        if len(rows):
            ts = rows["ts_ns"]
            made = int(((ts > np.uint64(path.start_ns)) & (ts <= np.uint64(path.end_ns))).sum())
            return f"{made} connections set up meanwhile, none that the path waited for long"
        return super().rule_out(path, ctx)


def _beside(d: During, ctx: Context) -> bool:
    return d.end_ns > ctx.request.start_ns and d.start_ns < ctx.request.end_ns


def _turns(
    sent: np.ndarray[tuple[int], np.dtype[np.uint64]], got: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> int:
    """How often sending began anew after something was received: the exchanges on a connection."""
    return len(np.unique(got.searchsorted(sent)))


RULE = _ConnectionSetup()
