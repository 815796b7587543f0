"""Waits for a free connection of a client's pool: one that was busy is used again as soon as it is done with.

Nothing shows otherwise that a pool is full: no connection is opened, no thread runs for the request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.causes.pools import AGAIN_NS, INET, MIN_NS, answer_ns, handed_ns
from whyspan.model import Culprit

_MAX_CONNECTIONS: Final = 512


class _Connection(NamedTuple):
    key: int
    ts: list[int]
    sends: list[bool]

    def before(self, t: int) -> bool | None:
        """Whether the last thing on it before *t* was a request; None when nothing was seen."""
        i = bisect_right(self.ts, t) - 1
        return self.sends[i] if i >= 0 else None


def connections(ctx: Context) -> Iterable[During]:
    """Yield the wait for an upstream connection that was used again as soon as another request was done with it."""
    r, timelines = ctx.request, ctx.timelines
    received = timelines.rows_of(r.start_tid, "sock_recv")
    if not len(received):
        return
    handed, answer = handed_ns(ctx), answer_ns(ctx)
    mine = received[
        np.isin(received["aux"] & 0xFF, INET)
        & (received["lport"] != r.server_port)
        & (received["ts_ns"] > np.uint64(handed))
        & (received["ts_ns"] <= np.uint64(answer))
    ]
    if not len(mine):
        return
    # What a loop read for others after it had handed this request on is not its own.
    before = mine[mine["ts_ns"] <= np.uint64(_handed_on(answer, ctx))]
    mine = before if len(before) else mine
    last, key, port = int(mine["ts_ns"][-1]), int(mine["key"][-1]), int(mine["rport"][-1])
    pool = _pool(port, ctx)
    used = pool.get(key)
    if used is None:
        return
    at = [t for t, sent in zip(used.ts, used.sends, strict=True) if sent and handed < t < last]
    asked = _first_of_last(at, used)
    done = [t for t, sent in zip(used.ts, used.sends, strict=True) if not sent and t < asked]
    if not asked or not done or done[-1] < handed or asked - done[-1] > AGAIN_NS or asked - handed < MIN_NS:
        return  # it had rested: a slot was free
    others = [c for c in pool.values() if c.key != key]
    if any(c.before(handed) is False and c.before(asked) is False for c in others):
        return  # one rested all the time
    if any(c.before(handed) is None and c.before(asked) is not None for c in others):
        return  # a new one was opened meanwhile: the pool was not full
    text = f"waited {(asked - handed) / MS:.0f} ms for one of {len(pool)} connections to port {port}"
    name = f"{len(pool)} connections to port {port}"
    detail = f"all busy until one was used again {(asked - done[-1]) / MS:.1f} ms after its last response"
    yield During(handed, asked, text, Culprit(kind="process", name=name, tgid=r.tgid, detail=detail))


def _handed_on(answer_ns: int, ctx: Context) -> int:
    """When the path last left the thread that serves the request for another one, before the answer."""
    r, at = ctx.request, answer_ns
    for segment in reversed(ctx.path.segments if ctx.path is not None else []):
        if segment.start_ns >= answer_ns:
            continue
        if segment.tid != r.start_tid:
            at = segment.start_ns
        elif at < answer_ns:
            break
    return at


def _pool(port: int, ctx: Context) -> dict[int, _Connection]:
    """Return the connections of the process to a port, with what it did on each."""
    r = ctx.request
    found: dict[int, list[tuple[int, bool]]] = {}
    for name in ("sock_send", "sock_recv"):
        rows = ctx.timelines.select(name)
        if not len(rows):
            continue
        rows = rows[(rows["tgid"] == r.tgid) & (rows["rport"] == port) & (rows["lport"] != r.server_port)]
        for key, ts in zip(rows["key"].tolist(), rows["ts_ns"].tolist(), strict=True):
            if len(found) < _MAX_CONNECTIONS or key in found:
                found.setdefault(key, []).append((ts, name == "sock_send"))
    return {
        key: _Connection(key, [t for t, _ in sorted(uses)], [s for _, s in sorted(uses)])
        for key, uses in found.items()
    }


def _first_of_last(sends: list[int], used: _Connection) -> int:
    """Return the first send of the last request in *sends*: a request may be written in several pieces."""
    if not sends:
        return 0
    i = used.ts.index(sends[-1])
    while i > 0 and used.sends[i - 1] and used.ts[i - 1] >= sends[0]:
        i -= 1
    return used.ts[i]
