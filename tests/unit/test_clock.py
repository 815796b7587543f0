"""Wall-clock time from monotonic time."""

from __future__ import annotations

import time

from whyspan import clock


def test_offset_agrees_with_both_clocks() -> None:
    wall = clock.to_unix_ns(time.monotonic_ns(), clock.offset_ns())
    assert abs(wall - time.time_ns()) < 1_000_000_000


def test_conversion_is_pure() -> None:
    assert clock.to_unix_ns(5, 1_000) == 1_005


def test_rfc3339() -> None:
    assert clock.rfc3339(1_767_323_045_678_901_234) == "2026-01-02T03:04:05.678Z"
    assert clock.rfc3339(0) == "1970-01-01T00:00:00.000Z"
    assert clock.rfc3339(1 << 70) == "1970-01-01T00:00:00.000Z"
