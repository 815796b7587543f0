"""Retries among the requests beside a request: which of them come again, and how much load that makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final, NamedTuple

import numpy as np

from whyspan.causes.client_self_queued import sender_label
from whyspan.causes.context import MS, Context
from whyspan.model import Request

#: Attempts are looked for from so long before the request's end on; those are counted that came from a little before
#: its start on, whose work it may have waited behind.
WINDOW_NS: Final = 20_000_000_000
BEFORE_NS: Final = 3_000_000_000
#: A retry comes within so long of the end of the attempt that failed. Source: back-off caps of common clients.
MAX_BACKOFF_NS: Final = 30_000_000_000
#: Arrivals per first attempt, and retries, from which on they are a storm.
MIN_AMPLIFICATION: Final = 1.5
MIN_RETRIES: Final = 5
#: Share of the failed attempts that must be followed by an arrival after the same delay, where nothing names a retry;
#: and how much more often that must be than arrivals alone would have it.
_MIN_BUNCHED: Final = 0.5
_OVER_CHANCE: Final = 2.0
#: Spread of the times between arrivals, as a share of their mean, below which they come like clockwork.
_REGULAR: Final = 0.3
_BIN_NS: Final = 25_000_000
_MAX_FAILED: Final = 256
_MAX_FOLLOWING: Final = 64
#: Statuses that clients try again after, and how an attempt ends that nobody waits for any more.
_AGAIN: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LEFT: Final = frozenset({"client_close", "client_reset", "timeout"})


class Storm(NamedTuple):
    """Retries in the window before a request. ``delay_ns``: the usual time from failure to retry; 0 not known."""

    retries: int
    arrivals: int
    failed: int
    delay_ns: int
    sender: str  # who sends most of them
    route: str
    window_ns: int

    @property
    def amplification(self) -> float:
        """Arrivals per first attempt."""
        return self.arrivals / max(self.arrivals - self.retries, 1)

    def __str__(self) -> str:
        """Return it in words."""
        after = f", {self.delay_ns / MS:.0f} ms after the attempt before failed" if self.delay_ns else ""
        return (
            f"{self.retries} of {self.arrivals} arrivals in {self.window_ns / 1e9:.1f} s were retries "
            f"({self.amplification:.1f} per first attempt){after}"
        )


def storm(ctx: Context) -> Storm | None:
    """Return the storm of retries that a request is in, or None."""
    found = tally(ctx)
    return found if found.retries >= MIN_RETRIES and found.amplification >= MIN_AMPLIFICATION else None


def tally(ctx: Context) -> Storm:
    """Return how many of the arrivals before the request's end were retries."""

    def count() -> Storm:
        r = ctx.request
        arrived = ctx.beside.arrived(r.service, r.end_ns - WINDOW_NS, r.end_ns)
        again: dict[_Key, int] = {}
        if _may_retry(arrived):
            again, settled = _named(arrived)
            again |= _bunched([a for a in arrived if (a.cookie, a.seq) not in again], settled)
        since = max(r.start_ns - BEFORE_NS, r.end_ns - WINDOW_NS)
        arrived = [a for a in arrived if a.start_ns >= since]
        retried = [a for a in arrived if (a.cookie, a.seq) in again]
        delays = sorted(ns for ns in again.values() if ns)
        who = Counter((sender_label(a), a.route) for a in retried if a.tenant or a.agent).most_common(1)
        route = Counter(a.route for a in retried).most_common(1)
        sender, path = who[0][0] if who else ("", route[0][0] if route else "")
        failed = sum(_failed(a) for a in arrived)
        return Storm(
            len(retried),
            len(arrived),
            failed,
            delays[len(delays) // 2] if delays else 0,
            sender,
            path,
            r.end_ns - since,
        )

    return ctx.memo("retries", count)


def _failed(request: Request) -> bool:
    return request.ended_by in _LEFT or request.status in _AGAIN or request.outcome == "killed"


def _ended_ns(request: Request) -> int:
    """When the sender gave an attempt up: its client left before the end, or it ended."""
    return request.left_ns or request.end_ns


_Key = tuple[int, int]  # connection and number of a request


def _may_retry(arrived: list[Request]) -> bool:
    """Whether there is anything to retry: on an ordinary day nobody gave up, which is quickly seen."""
    if any(a.attempt or a.left_ns or _failed(a) for a in arrived):
        return True
    # Nor did anybody who was not told of the end send the same again.
    waiting = [name for a in arrived if not a.end_ns for name in (a.trace_id, a.request_id) if name]
    names = set(waiting)
    return len(names) < len(waiting) or any(
        a.end_ns and (a.trace_id in names or a.request_id in names) for a in arrived
    )


def _named(arrived: list[Request]) -> tuple[dict[_Key, int], set[_Key]]:
    """Return the retries that name themselves, or an earlier attempt's trace or id, with the delay after that; and
    those earlier attempts.
    """
    settled: set[_Key] = set()
    last: dict[Hashable, Request] = {}
    again: dict[_Key, int] = {}
    for a in arrived:
        keys: list[Hashable] = []
        if a.trace_id_source == "traceparent":
            keys.append(("trace", a.trace_id, a.route))
        if a.request_id:
            keys.append(("id", a.request_id, a.tenant, a.route))
        before = next((last[k] for k in keys if k in last), None)
        if a.attempt > 0 or (before is not None and _gave_up(before, a)):
            ended = _ended_ns(before) if before is not None else 0
            again[a.cookie, a.seq] = a.start_ns - ended if 0 < ended < a.start_ns else 0
            if before is not None:
                settled.add((before.cookie, before.seq))
        last.update(dict.fromkeys(keys, a))
    return again, settled


def _gave_up(before: Request, after: Request) -> bool:
    """Whether an attempt had failed, or was left, within a back-off of the next one; or is waited for no more."""
    ended = _ended_ns(before)
    if not ended or ended > after.start_ns:
        return after.start_ns > before.start_ns and not ended  # its sender did not wait for its end
    left = 0 < before.left_ns < before.end_ns  # whoever has its trace again did not wait for the answer
    return (left or _failed(before)) and after.start_ns - ended <= MAX_BACKOFF_NS


def _bunched(arrived: list[Request], settled: set[_Key]) -> dict[_Key, int]:
    """Return the arrivals that follow failed attempts of their kind after one and the same delay, with the delay."""
    kinds: dict[Hashable, list[Request]] = {}
    for a in arrived:
        kinds.setdefault((a.tenant, a.agent, a.method, a.route, a.request_bytes), []).append(a)
    again: dict[_Key, int] = {}
    for like in kinds.values():
        lost = (a for a in like if _failed(a) and (a.cookie, a.seq) not in settled)
        failed = sorted(_ended_ns(a) for a in lost if _ended_ns(a))[-_MAX_FAILED:]
        # Of those that come like clockwork each follows each failure after the same time.
        if len(failed) >= MIN_RETRIES and not _regular(like):
            again |= _after(failed, like)
    return again


def _regular(like: list[Request]) -> bool:
    gaps = np.diff(np.array([a.start_ns for a in like], np.float64))
    return bool(gaps.std() < _REGULAR * gaps.mean())


def _after(failed: list[int], like: list[Request]) -> dict[_Key, int]:
    starts = np.array([a.start_ns for a in like], np.int64)
    pairs: list[tuple[int, int, int]] = []  # delay, position of the arrival, of the failure
    for k, ended in enumerate(failed):
        first = int(starts.searchsorted(ended, "right"))
        for i in range(first, min(first + _MAX_FOLLOWING, len(starts))):
            delay = int(starts[i]) - ended
            if delay > MAX_BACKOFF_NS:
                break
            pairs.append((delay, i, k))
    if not pairs:
        return {}
    # The pair of neighbouring bins that most failures have an arrival in.
    bins: dict[int, set[int]] = {}
    for delay, _, k in pairs:
        for b in (delay // _BIN_NS, delay // _BIN_NS + 1):
            bins.setdefault(b, set()).add(k)
    best = min(bins, key=lambda b: (-len(bins[b]), b))
    lo, hi = (best - 1) * _BIN_NS, (best + 1) * _BIN_NS
    # Those whose retry would be still to come cannot tell.
    due = sum(ended + hi <= int(starts[-1]) for ended in failed)
    span = max(int(starts[-1] - starts[0]), 1)
    chance = -float(np.expm1(-len(starts) / span * (hi - lo)))
    if len(bins[best]) < max(_MIN_BUNCHED, min(_OVER_CHANCE * chance, 1.0)) * max(due, MIN_RETRIES):
        return {}
    taken: dict[_Key, int] = {}
    used: set[int] = set()
    for delay, i, k in pairs:
        key = like[i].cookie, like[i].seq
        if lo <= delay < hi and k not in used and key not in taken:
            taken[key] = delay
            used.add(k)
    return taken
