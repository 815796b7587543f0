"""What is known of observers, our own probes among them, and of the host's CPUs: facts, kept and bounded."""

from __future__ import annotations

from typing import Final

from whyspan.lru import Lru
from whyspan.model import HostCpuFact, OwnFact, ProbeCostFact, TracerFact

_MAX_OWN: Final = 64
_MAX_TRACED: Final = 1024
_MAX_PROBES: Final = 256


class Observers:
    """Later facts replace earlier ones."""

    def __init__(self) -> None:
        self._own: Lru[int, OwnFact] = Lru(_MAX_OWN)
        self._traced: Lru[int, TracerFact] = Lru(_MAX_TRACED)
        self._costs: Lru[str, ProbeCostFact] = Lru(_MAX_PROBES)
        self.host = HostCpuFact()

    def put(self, fact: OwnFact | TracerFact | ProbeCostFact | HostCpuFact) -> None:
        """Take in a fact."""
        if isinstance(fact, OwnFact):
            self._own.put(fact.tgid, fact)
        elif isinstance(fact, TracerFact):
            self._traced.put(fact.tid, fact)
        elif isinstance(fact, ProbeCostFact):
            self._costs.put(fact.probe, fact)
        else:
            self.host = fact

    def own(self, tgid: int) -> str:
        """Return the name of a process of the agent's own; empty for any other."""
        fact = self._own.get(tgid)
        return fact.name if fact is not None else ""

    def tracer(self, tid: int) -> TracerFact | None:
        """Return who traced a thread when it was last seen stopped, or None."""
        fact = self._traced.get(tid)
        return fact if fact is not None and fact.tracer_tgid else None

    def costs(self) -> list[ProbeCostFact]:
        """Return what each of our probes costs, as far as that was measured."""
        return self._costs.values()
