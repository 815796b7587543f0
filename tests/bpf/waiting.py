"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: How many times slower than a host this machine is: above 1 in guests under QEMU's translation.
SLOW = float(os.environ.get("WHYSPAN_SLOW") or 1)
#: Where a test gives up.
DEADLINE_S = 20.0 * SLOW


def until(condition: Callable[[], T], what: str, timeout_s: float = DEADLINE_S, every_s: float = 0.005) -> T:
    """Return the condition's first true value.

    Raises:
        AssertionError: it stayed false for *timeout_s*.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}; last seen {value!r}")
        time.sleep(every_s)
