"""A feed's own time, made CLOCK_MONOTONIC and held to what is possible."""

from __future__ import annotations

from typing import Final

#: A feed's own time may lie so long before its arrival; a replay brings what is older.
MAX_AGE_NS: Final = 60_000_000_000


def mono_ns(unix_s: float, offset_ns: int, now_ns: int) -> int:
    """Return when that was, CLOCK_MONOTONIC: not after *now_ns*, and not a minute before it.

    Args:
        unix_s: Finite; 0 when the feed does not say, which gives *now_ns*.
        offset_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC.
        now_ns: When it arrived, CLOCK_MONOTONIC.
    """
    if not 0 < unix_s < 1e11:
        return now_ns
    return min(max(int(unix_s * 1e9) - offset_ns, now_ns - MAX_AGE_NS, 0), now_ns)
