"""Proofs that a fault bites, out of the kernel's own counters."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.demo.procs import DemoError, cpu_ns, run_delay_ns


class Cpu:
    """CPU time of some processes, from here on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._began, self._before = time.monotonic(), self._now()

    def _now(self) -> int:
        return sum(cpu_ns(pid) for pid in self._pids)

    def ratio(self) -> float:
        """Return the share of one CPU that they used so far."""
        return (self._now() - self._before) / 1e9 / max(time.monotonic() - self._began, 0.001)

    def told(self) -> str:
        """Return it in words."""
        return f"{self.ratio():.0%} of a CPU used"

    def check(self, least: float) -> None:
        """Raise DemoError when they used less."""
        if self.ratio() < least:
            raise DemoError(f"it does not bite: only {self.told()}")


class RunDelay:
    """Time that some processes' threads waited for a CPU, from here on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._began, self._before = time.monotonic(), self._now()

    def _now(self) -> int:
        return sum(run_delay_ns(pid) for pid in self._pids)

    def ratio(self) -> float:
        """Return it as a share of the time."""
        return (self._now() - self._before) / 1e9 / max(time.monotonic() - self._began, 0.001)

    def told(self) -> str:
        """Return it in words."""
        return f"run delay {self.ratio():.0%} of the time"

    def check(self, least: float) -> None:
        """Raise DemoError when it is less."""
        if self.ratio() < least:
            raise DemoError(f"it does not bite: {self.told()}")
