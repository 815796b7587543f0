"""``net.loss``: what one side had sent was lost, and sent again after a while."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from whyspan_probes.schema import Events

from whyspan.causes.context import Context
from whyspan.causes.during import During
from whyspan.causes.rule import Claim
from whyspan.causes.wire import ConnectionRule, by_connection, by_network, peer, rests, sent_ns
from whyspan.critical_path import PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED

_TIMEOUT, _FAST, _PROBE, _SYN = 1, 2, 3, 4  # aux of tcp_retransmit
_US: Final = 1000
#: A retransmit that duplicate acknowledgements brought about comes a round trip after the loss, and some reordering.
_FAST_ROUNDS: Final = 2
_LEAST_FAST_NS: Final = 1_000_000


class _Loss(ConnectionRule):
    """Lost segments of this request's connection while its response waits for room, or of a connection whose answer
    it waits for: from when the bytes were sent, or from the time-out before, to when they were sent again.

    What a streamed response loses after the server wrote it does not delay the server: it lies behind the interval
    that is explained. Retransmits of the other side are seen only where that side is on this host, too; what a peer
    elsewhere loses shows as a hole in the stream (``net.transport``), or not at all.
    """

    id = "net.loss"
    title = "waiting for lost packets to be sent again"
    neighbours = ("net.delivery", "net.connection_setup", "python.frontend_saturated", "engine.straggler")
    fix = (
        "Try `nstat` and the counters of the network cards and switches between the two ends; look for a full queue, "
        "a bad cable or a wrong MTU on the way."
    )
    rank = 35
    events = ("tcp_retransmit",)
    nothing = "no retransmit on a connection that the request used"

    def find(self, ctx: Context) -> Mapping[int, Iterable[During]]:
        """Return the time between sending and sending again, by connection."""
        rows = ctx.timelines.select("tcp_retransmit")
        rows = rows[rows["aux"] != _SYN]  # while it connects: net.connection_setup
        out: dict[int, list[During]] = defaultdict(list)
        for cookie, mine in by_connection(rows).items():
            out[cookie] += self._own(cookie, mine, ctx)
            for other in self._peers_of(mine, ctx):
                out[other] += self._theirs(other, mine, ctx)
        return out

    def _own(self, cookie: int, rows: Events, ctx: Context) -> Iterator[During]:
        who = peer(cookie, int(rows["rport"][0]), ctx, _told(rows))
        for row in rows:
            t, waited = int(row["ts_ns"]), _waited_ns(row)
            sent = sent_ns(cookie, int(row["seq"]), t, ctx)
            yield During(max(sent, t - waited), t, _told(rows), who, inferred=int(row["aux"]) == _PROBE)

    def _theirs(self, cookie: int, rows: Events, ctx: Context) -> Iterator[During]:
        who: Culprit = peer(cookie, int(rows["lport"][0]), ctx, f"on this host; {_told(rows)}")
        for row in rows:
            t = int(row["ts_ns"])
            yield During(t - _waited_ns(row), t, f"the other side: {_told(rows)}", who, inferred=True)

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim waits for such a connection; of a loop also the rests before it found room in the request's own."""
        claim = super().match(segment, ctx)
        own = self.found(ctx).get(ctx.request.cookie) if claim is None and ctx.request.cookie else None
        d = own.first(segment.start_ns, segment.end_ns) if own else None
        if d is None or not rests(segment, ctx) or not self._for_room(segment, ctx):
            return claim
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, inferred=True, start_ns=lo, end_ns=hi)

    @staticmethod
    def _for_room(segment: PathSegment, ctx: Context) -> bool:
        """Return whether it was the network that let the thread write on: it had no room before."""
        rows = ctx.timelines.keyed("sock_send", "key", ctx.request.cookie)
        rows = rows[rows["tid"] == segment.tid]
        i = int(rows["ts_ns"].searchsorted(np.uint64(segment.end_ns), "right"))
        if i >= len(rows):
            return False
        thread = ctx.timelines.thread(segment.tid)
        rest = thread.before(thread.awake_since(int(rows["ts_ns"][i])))
        return rest.state == BLOCKED and by_network(thread.wait(rest.at), ctx)

    @staticmethod
    def _peers_of(rows: Events, ctx: Context) -> list[int]:
        """Return the watched connections whose other end is the one that sent again: the same ports, turned round."""
        lport, rport = int(rows["lport"][0]), int(rows["rport"][0])
        found: set[int] = set()
        for name in ("sock_recv", "sock_send"):
            near = ctx.timelines.keyed(name, "lport", rport)
            found |= set(np.unique(near["key"][near["rport"] == lport]).tolist())
        return sorted(found)


def _waited_ns(row: np.void) -> int:
    if int(row["aux"]) == _FAST:
        return max(int(row["srtt_us"]) * _FAST_ROUNDS * _US, _LEAST_FAST_NS)
    return int(row["rto_us"]) * _US


def _told(rows: Events) -> str:
    timeouts = int((rows["aux"] == _TIMEOUT).sum())
    longest = int(rows["rto_us"][rows["aux"] == _TIMEOUT].max()) / 1000 if timeouts else 0.0
    after = f", {timeouts} of them after time-outs of up to {longest:.0f} ms" if timeouts else ""
    return f"{len(rows)} segment{'s' if len(rows) > 1 else ''} sent again{after}"


RULE = _Loss()
