"""The only place where wall-clock time is derived. Everything else counts CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime

_TRIES = 3


def offset_ns() -> int:
    """Measure CLOCK_REALTIME minus CLOCK_MONOTONIC, in ns.

    The wall clock is read between two readings of the monotonic one; the narrowest of three brackets wins, so
    that a preemption between two reads does not shift the result.
    """
    best_width, best_offset = -1, 0
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if best_width < 0 or after - before < best_width:
            best_width, best_offset = after - before, wall - (before + after) // 2
    return best_offset


def to_unix_ns(mono_ns: int, offset: int) -> int:
    """Return *mono_ns* (CLOCK_MONOTONIC) as ns since the Unix epoch, given an offset from `offset_ns`."""
    return mono_ns + offset


def now_unix_ns() -> int:
    """Return the current wall-clock time in ns since the Unix epoch."""
    return time.time_ns()


def rfc3339(unix_ns: int) -> str:
    """Return *unix_ns* as RFC 3339 in UTC with milliseconds, such as ``2026-01-02T03:04:05.678Z``.

    A time outside the years 1970 to 9999 (a broken record) is shown as the epoch rather than raised.
    """
    seconds, rest = divmod(unix_ns, 1_000_000_000)
    try:
        day = datetime.fromtimestamp(max(seconds, 0), tz=UTC)
    except (OverflowError, ValueError, OSError):
        day, rest = datetime.fromtimestamp(0, tz=UTC), 0
    return f"{day:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"
