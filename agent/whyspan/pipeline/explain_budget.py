"""How much CPU explanations may take: a token bucket of CPU seconds, refilled by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

#: What may be spent at once, in seconds' worth of the ratio: a burst of slow requests is what the agent is for.
BURST_S: Final = 20.0
#: CPU seconds of one batch, at most: its findings leave together, and what comes in meanwhile waits.
BATCH_S: Final = 0.25


class ExplainBudget:
    """Says whether another explanation may be made. ``spent`` is to be called after each.

    A request with a thousand engine steps takes a hundred times the CPU of a short one: a limit by number alone does
    not bound what the agent takes from the host.
    """

    def __init__(
        self,
        core_ratio: float,
        cpu: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*core_ratio*: CPU seconds per second, of one core."""
        self._cpu, self._clock = cpu, clock
        self._at_s, self._cpu_s = clock(), cpu()
        self.reconfigure(core_ratio)

    def reconfigure(self, core_ratio: float) -> None:
        """Go by another ratio, with nothing spent of it."""
        self._ratio = core_ratio
        self._left_s = core_ratio * BURST_S
        # More than a thread can take is no limit at all: everything is to be explained, however late.
        self._most_s = BATCH_S if core_ratio <= 1.0 else math.inf
        self._batch_s = self._most_s

    def begin(self) -> None:
        """Begin a batch."""
        self._batch_s = self._most_s

    def allows(self) -> bool:
        """Return whether there is CPU left; call it just before an explanation."""
        self._cpu_s = self._cpu()
        return self.has_left() and self._batch_s > 0

    def has_left(self) -> bool:
        """Return whether another batch may explain anything."""
        now_s = self._clock()
        self._left_s = min(self._left_s + self._ratio * (now_s - self._at_s), self._ratio * BURST_S)
        self._at_s = now_s
        return self._left_s > 0

    def spent(self) -> None:
        """Count the CPU time since the last ``allows``."""
        used = self._cpu() - self._cpu_s
        self._left_s -= used
        self._batch_s -= used
