"""``client.artifact``: the client took its time to send the request, or did not send it in one go."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np

from whyspan.causes.client_self_queued import sender_label
from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.causes.on_thread import OnThreadRule
from whyspan.model import Culprit
from whyspan.syscalls import POLL
from whyspan.timeline import BLOCKED

#: Shorter gaps between two reads of a request are how networks and kernels cut it.
MIN_GAP_NS: Final = 1_000_000
_MAX_READS: Final = 4096
_RECV: Final = frozenset({0, 19, 45, 47})  # read, readv, recvfrom, recvmsg


class _Artifact(OnThreadRule):
    id = "client.artifact"
    title = "waiting for the rest of the request, which the client had not sent yet"
    neighbours = ("net.transport", "net.loss", "python.loop_blocked", "client.self_queued")
    fix = (
        "Try the client or the proxy in front of it from nearer by: the server waited for the request's body."
    )
    rank = 41
    events = ("sock_recv",)
    nothing = "the request arrived in one go: its reader did not wait for the rest of it"
    states = frozenset({BLOCKED})

    def applies(self, ctx: Context) -> bool:
        """Return whether the request was read in more than one go."""
        return len(_reads(ctx)) > 1

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Yield what the thread waited, in a call that waits for the network, between two reads of the request."""
        r = ctx.request
        reads = _reads(ctx)
        thread = ctx.timelines.thread(tid)
        sent = f"sent {r.request_bytes:,} bytes over {(reads[-1][0] - reads[0][0]) / MS:.0f} ms"
        who = Culprit(kind="peer", name=sender_label(r), detail=sent)
        for (before, _), (at, reader) in pairwise(reads):
            if reader != tid or at - before < MIN_GAP_NS:
                continue
            for since, until, interval in thread.intervals(before, at):
                if interval.state != BLOCKED or until - since < MIN_GAP_NS:
                    continue
                wait = thread.wait(interval.at)
                if wait.syscall_nr in POLL or wait.syscall_nr in _RECV:
                    yield During(since, until, f"the client {sent}", who)


def _reads(ctx: Context) -> list[tuple[int, int]]:
    """Return the reads of the request, as (time, thread), up to the first byte of its answer."""

    def look() -> list[tuple[int, int]]:
        r = ctx.request
        if not r.cookie or not r.recv_ns:
            return []
        rows = ctx.timelines.keyed("sock_recv", "key", r.cookie)
        until = r.head_ns or r.first_ns or r.end_ns
        ts = rows["ts_ns"]
        # The first read is stamped at its end, after recv_ns.
        inside = (ts >= np.uint64(r.start_ns)) & (ts <= np.uint64(until)) & (rows["bytes"] > 0)
        rows = rows[inside][-_MAX_READS:]
        return list(zip(rows["ts_ns"].tolist(), rows["tid"].tolist(), strict=True))

    return ctx.memo("reads of the request", look)


RULE = _Artifact()
