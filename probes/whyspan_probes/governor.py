"""Measures what the probes cost, and detaches them in a declared order when it passes the budget; later tries again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from whyspan_probes import program_stats
from whyspan_probes.loader import Session
from whyspan_probes.program_stats import RunStats, StatsWindow

log = logging.getLogger("whyspan.governor")

#: Run-time statistics are on for 1 s in 30: they inflate what they measure.
WINDOW_S, PERIOD_S = 1.0, 30.0
#: A window over budget is confirmed by another after this time: one second may be a peak.
CONFIRM_S = 5.0
#: A probe waits for its turn while it has a smaller share of what all that may be detached cost.
WORTH_RATIO = 0.1
#: The targets' use is the most of this many windows: while they are starved, they burn little and cost as much.
TARGET_WINDOWS = 4
#: A probe is tried again after this time, and after twice as long each time that it had to go once more.
RETRY_S, LONGEST_RETRY_S = 300.0, 4 * 3600.0
#: It is tried only while the others cost no more than this share of the budget.
HEADROOM_RATIO = 0.5


class Budget(NamedTuple):
    """Limits: a share of one core, or a share of what the targets burn, whichever is more."""

    core_ratio: float
    target_ratio: float

    def limit(self, target_cores: float) -> float:
        """Return the budget in cores, given what the targets burn in cores."""
        return max(self.core_ratio, self.target_ratio * target_cores)


class _Shed(NamedTuple):
    due_s: float
    delay_s: float


class Governor:
    """Call ``tick`` often; it does little except at the ends of its windows.

    ``overhead`` is the agent's own use and ``targets`` that of the watched processes, in CPU seconds so far.
    """

    def __init__(
        self,
        session: Session,
        budget: Budget,
        overhead: Callable[[], float],
        targets: Callable[[], float],
    ) -> None:
        self._session, self._budget = session, budget
        self._overhead, self._targets = overhead, targets
        self._window: StatsWindow | None = None
        self._next_s = 0.0
        self._opened_s = 0.0
        self._before: dict[tuple[str, str], RunStats] = {}
        self._cpu_before = (0.0, 0.0)
        self.bpf_cores = 0.0
        self.agent_cores = 0.0
        self.target_cores = 0.0
        self.confirming = False  # the last window was over budget; the next one decides
        self._burnt: deque[float] = deque(maxlen=TARGET_WINDOWS)
        self._shed: dict[str, _Shed] = {}

    def rebudget(self, budget: Budget) -> None:
        """Enforce other limits. What is detached stays so."""
        self._budget = budget

    def tick(self, now_s: float) -> bool:
        """Open or close a measuring window when due. Returns True when new figures are there."""
        if self._window is None:
            if now_s >= self._next_s:
                self._open(now_s)
            return False
        if now_s - self._opened_s < WINDOW_S:
            return False
        self._measure(now_s)
        self._enforce(now_s)
        return True

    def close(self) -> None:
        """Stop measuring."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def _read(self) -> dict[tuple[str, str], RunStats]:
        return {
            (p.probe.name, program): program_stats.read(fd)
            for p in self._session.probes
            for program, fd in p.program_fds().items()
        }

    def _open(self, now_s: float) -> None:
        try:
            self._window = StatsWindow()
        except OSError as e:
            log.warning("cost of the probes is not measured: %s", e)
            self._next_s = now_s + 3600
            return
        self._opened_s, self._next_s = now_s, now_s + PERIOD_S
        self._before = self._read()
        self._cpu_before = (self._overhead(), self._targets())

    def _measure(self, now_s: float) -> None:
        elapsed = now_s - self._opened_s
        after = self._read()
        self.close()
        self.bpf_cores = 0.0
        for p in self._session.probes:
            ns = hits = 0
            for program in p.program_fds():
                key = (p.probe.name, program)
                if key in self._before and key in after:
                    ns += after[key].run_ns - self._before[key].run_ns
                    hits += after[key].runs - self._before[key].runs
            p.state.missed = sum(s.missed for (name, _), s in after.items() if name == p.probe.name)
            p.state.missed += p.link_misses()
            p.state.hits_per_s = hits / elapsed
            p.state.ns_per_hit = ns / hits if hits else 0.0
            p.state.core_ratio = ns / 1e9 / elapsed
            self.bpf_cores += p.state.core_ratio
        overhead, targets = self._overhead(), self._targets()
        self.agent_cores = max(0.0, overhead - self._cpu_before[0]) / elapsed
        self.target_cores = max(0.0, targets - self._cpu_before[1]) / elapsed
        self._burnt.append(self.target_cores)

    def _enforce(self, now_s: float) -> None:
        used, limit = self.bpf_cores + self.agent_cores, self._budget.limit(max(self._burnt))
        if self.bpf_cores <= limit:
            # Detaching a probe lowers the cost of the probes; the agent's own is bounded by rates.
            self.confirming = False
            if self.bpf_cores <= HEADROOM_RATIO * limit:
                self._retry(now_s)
            return
        if not self.confirming:
            self.confirming = True
            self._next_s = now_s + CONFIRM_S
            return
        self.confirming = False
        candidates = [p for p in self._session.probes if p.attached and p.probe.shed > 0]
        if not candidates:
            return
        # One that costs next to nothing saves nothing, whatever its turn.
        least = WORTH_RATIO * sum(p.state.core_ratio for p in candidates)
        victim = min((p for p in candidates if p.state.core_ratio >= least), key=lambda p: p.probe.shed)
        reason = (
            f"over budget: probes {self.bpf_cores:.2%} and agent {used - self.bpf_cores:.2%} of a core, "
            f"limit {limit:.2%}"
        )
        log.warning("probe %s detached: %s", victim.probe.name, reason)
        victim.shed(reason)
        before = self._shed.get(victim.probe.name)
        delay_s = min(2 * before.delay_s, LONGEST_RETRY_S) if before else RETRY_S
        self._shed[victim.probe.name] = _Shed(now_s + delay_s, delay_s)

    def _retry(self, now_s: float) -> None:
        """Attach the probe again that would have been the last to go: one at a time, each seen in a window first."""
        due = [
            p
            for p in self._session.probes
            if p.state.state == "shed" and self._shed.get(p.probe.name, _Shed(0.0, 0.0)).due_s <= now_s
        ]
        if not due:
            return
        probe = max(due, key=lambda p: p.probe.shed)
        self._session.attach_again(probe)
        log.info("probe %s tried again: %s", probe.probe.name, probe.state.state)
