"""``net.transport``: a message stopped in its middle, and packets came out of order; whether lost is not known here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During
from whyspan.causes.rule import Claim
from whyspan.causes.wire import ConnectionRule, awaited, by_connection, others, peer, received_before
from whyspan.critical_path import PathSegment

#: Packets that overtake each other on their way arrive within a fraction of this.
MIN_NS: Final = 5_000_000


class _Transport(ConnectionRule):
    """The parent of ``net.loss`` and ``net.nagle``: the trouble is on the way, and only the sender knows which.

    A wait in the middle of a message (what was done with the connection before was to receive), after which the stream
    went on with packets that had come out of order: what fills a hole was lost and sent again, or took another way.
    Before a message's first byte such a wait is the peer's time to think, whatever the order of its packets.
    """

    id = "net.transport"
    title = "waiting in the middle of a message for packets that came late"
    neighbours = ("net.loss", "net.delivery", "python.frontend_saturated", "engine.straggler")
    fix = "Try `nstat` on the sending side; look for loss and for several ways of unequal length between the two ends."
    rank = 36
    events = ("sock_hole",)
    nothing = "no packet came out of order on a connection that the request used"

    def find(self, ctx: Context) -> Mapping[int, Iterable[During]]:
        """Return the moments at which streams with holes in them went on."""
        return {
            cookie: [
                During(
                    int(row["ts_ns"]) - 1,
                    int(row["ts_ns"]),
                    f"{int(row['packets'])} packets came out of order",
                    peer(cookie, int(row["rport"]), ctx, f"round trip {int(row['srtt_us']) / 1000:.1f} ms"),
                )
                for row in rows
            ]
            for cookie, rows in by_connection(ctx.timelines.select("sock_hole")).items()
        }

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a wait whose end is the receive that the hole was found at."""
        wait = segment.wait
        if wait is None or segment.whole_ns < MIN_NS:
            return None
        touch = awaited(segment, ctx)
        if touch is None or not touch.recv or others(touch, ctx) or touch.cookie not in self.found(ctx):
            return None
        until = ctx.timelines.thread(segment.tid).next_block(wait.end_ns) or segment.end_ns + MIN_NS
        d = self.found(ctx)[touch.cookie].first(wait.end_ns, until)
        if d is None or not received_before(touch.cookie, wait.end_ns - 1, ctx):
            return None
        return Claim(self.id, d.detail, d.culprit, inferred=True)


RULE = _Transport()
