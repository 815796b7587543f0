"""``net.nagle``: a small write had to wait for the other side's delayed acknowledgement of the one before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.causes.wire import ConnectionRule, peer
from whyspan.critical_path import Path

#: A round trip to a near peer takes less; a delayed acknowledgement takes 40 ms or more (TCP_DELACK_MIN).
MIN_NS: Final = 10_000_000


class _Nagle(ConnectionRule):
    """A tail held back on a connection whose answer the request waits for, from the write to when it left.

    On the request's own connection the tail of a *response* is held back after the server wrote it: the client loses
    that time and the server does not. It lies behind the interval that is explained, and is told only where this cause
    is ruled out. A request's body that the *client's* kernel holds back is not seen from here.
    """

    id = "net.nagle"
    title = "waiting for a small write that TCP held back (Nagle) until a delayed acknowledgement"
    neighbours = ("net.loss", "net.delivery", "net.connection_setup")
    fix = "Try TCP_NODELAY on that connection, or one write for head and body."
    rank = 34
    events = ("sock_held",)
    nothing = "no small write was held back for an acknowledgement"

    def find(self, ctx: Context) -> Mapping[int, Iterable[During]]:
        """Return the time from the write to when its tail left, by connection."""
        out: dict[int, list[During]] = defaultdict(list)
        rows = ctx.timelines.select("sock_held")
        for row in rows:
            held, left, cookie = int(row["held_ns"]), int(row["left_ns"]), int(row["cookie"])
            if left - held < MIN_NS:
                continue
            text = f"{int(row['bytes'])} bytes waited {(left - held) / MS:.0f} ms for an acknowledgement"
            who = peer(cookie, int(row["rport"]), ctx, f"{text}; TCP_NODELAY is off")
            out[cookie].append(During(held, left, text, who))
        return out

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return what was held back beside the request, or after it was written."""
        own = self.found(ctx).get(ctx.request.cookie) if ctx.request.cookie else None
        if own:
            total = sum(d.end_ns - d.start_ns for d in own) / MS
            return f"writes of the response were held back {total:.0f} ms after the server wrote them"
        return super().rule_out(path, ctx)


RULE = _Nagle()
