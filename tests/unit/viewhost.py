"""What a collector says of itself and its host every 10 s, made up but counted by the real tally."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from math import sin
from typing import Any, Final

import msgspec
from whyspan.config import Slo
from whyspan.model import Finding, Request
from whyspan.tally import Tally
from whyspan_exporters.link import Count

_PROBES: Final = (
    ("sched", "thread states", "attached", 41_000.0, 210.0),
    ("sock", "requests on sockets", "attached", 5_200.0, 480.0),
    ("futex", "locks", "attached", 9_800.0, 330.0),
    ("usdt_vllm", "marks of the engine", "waiting", 0.0, 0.0),
    ("block", "disks", "partial", 120.0, 900.0),
    ("yields", "calls of sched_yield", "shed", 0.0, 0.0),
)


class Host:
    """A collector that has been running since the first `tell`."""

    def __init__(self, instance: str) -> None:
        self._rng = random.Random(3)
        self._tally = Tally()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._cpu_s = 0.0

    def tell(self, slot: int, found: Sequence[Finding]) -> tuple[dict[str, Any], list[Count]]:
        """Return the state and the counts at the end of a slot of 10 s, in which requests like *found* ended."""
        for f in found:
            self._add(f.request, 1.0)
            for _ in range(9):  # those that are neither slow nor sampled
                if not f.slow:
                    self._add(f.request, self._rng.lognormvariate(0, 0.15))
            self._counts["requests", f.request.service, str(f.request.status)] += 1
        wave = (1 + sin(slot / 40)) / 2
        self._counts["throttled_us", "chat", ""] += int(wave * 1.5e6)
        self._counts["lost_events", "", "sched_switch"] += 3 if slot % 50 == 49 else 0
        self._cpu_s += 0.12 + 0.04 * wave
        counts = [Count(*key, value) for key, value in (*self._counts.items(), *self._tally.counts.items())]
        return self._state(slot, wave), counts

    def _add(self, request: Request, factor: float) -> None:
        wall = int((request.end_ns - request.start_ns) * factor)
        first = int((request.first_ns - request.start_ns) * factor)
        r = msgspec.structs.replace(
            request, first_ns=request.start_ns + first, end_ns=request.start_ns + wall
        )
        self._tally.add(r, Slo(ttft_ms=500.0, e2e_ms=1500.0), "")

    def _state(self, slot: int, wave: float) -> dict[str, Any]:
        gib = 1 << 30
        return {
            "probes": [
                {
                    "name": name, "title": title, "cost": "per switch", "state": state, "events": slot * 10,
                    "reason": {"shed": "over the budget", "partial": "no block_rq_issue"}.get(state, ""),
                    "hooks": {}, "files": [], "hits_per_s": hits * (0.6 + 0.4 * wave), "ns_per_hit": ns,
                    "core_ratio": hits * ns * (0.6 + 0.4 * wave) / 1e9, "drops": 0, "missed": 0,
                }
                for name, title, state, hits, ns in _PROBES
            ],
            "watched": [{"tgid": 4100, "service": "chat", "rule": "uvicorn"}],
            "watched_by_service": {"chat": 2, "rag": 1, "embed": 1},
            "open_requests": 3,
            "events": slot * 60,
            "agent_core_ratio": 0.012 + 0.004 * wave,
            "bpf_core_ratio": 0.009 + 0.003 * wave,
            "target_cores": 6.0 * wave,
            "findings_dropped": 0,
            "findings_pending": 0,
            "cpu_s": self._cpu_s,
            "rss_bytes": 61 << 20,
            "uptime_s": slot * 10.0,
            "tgid": 970,
            **self._tally.state(slot * 10_000_000_000),
            "pressure": {
                "cpu": {"some": 0.05 + 0.4 * wave, "full": 0.02 * wave},
                "memory": {"some": 0.01 * wave, "full": 0.0},
                "io": {"some": 0.03, "full": 0.01},
            },
            "cpu_limits": {"chat": 2.0},
            "memory": {"total_bytes": 64 * gib, "available_bytes": int((20 - 12 * wave) * gib)},
            "runnable": int(2 + 20 * wave),
            "cpus": 16,
        }  # fmt: skip

    def exporter(self) -> dict[str, Any]:
        """Return what the exporter says of itself."""
        return {
            "tgid": 971,
            "cpu_s": self._cpu_s / 6,
            "rss_bytes": 38 << 20,
            "sinks": {
                "store": {"state": "", "dropped": 0, "pending": 0, "bytes": 48 << 20},
                "otlp": {"state": "connection refused", "spooled": 12, "bytes": 90_000},
            },
        }
