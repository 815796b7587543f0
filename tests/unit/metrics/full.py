"""Figures with something of every metric that can be filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whyspan.config import Objectives
from whyspan.model import EngineFacts, Finding
from whyspan.tally import Tally
from whyspan_exporters.link import Count
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.records import EXPORTER, Counts, Explained, Status, finding_id

SCHED = {
    "name": "sched",
    "state": "attached",
    "events": 1009,
    "drops": 13,
    "missed": 3,
    "hits_per_s": 5148.5,
    "ns_per_hit": 299.0,
    "core_ratio": 0.0028,
}
COLLECTOR: dict[str, Any] = {
    "probes": [SCHED],
    "watched_by_service": {"chat": 3},
    "open_requests": 5,
    "target_cores": 1.25,
    "findings_dropped": 11,
    "findings_pending": 4,
    "cpu_s": 2.5,
    "rss_bytes": 90_000_000,
    "uptime_s": 3.0,
    "pressure": {"cpu": {"some": 0.25, "full": 0.0}, "io": {"some": 0.125}},
    "cpu_limits": {"chat": 0.5},
    "engines": [
        {
            "service": "chat",
            "engine": "vllm",
            "state": "ok",
            "running": 3,
            "waiting": 5,
            "zombies": 1,
            "kv_usage": 0.5,
            "kv_blocks": {"used": 7, "cached": 2, "free": 11},
            "fragmentation": 0.125,
            "batch": 4.5,
            "tokens_per_step": 101.25,
            "frozen_s": 4.0,
        }
    ],
    "bursts": {
        "malloc": [
            {
                "service": "chat",
                "thread": "worker",
                "size_class": "1-2 KiB",
                "mean_blocked_ns": 5,
                "lock_waits": 7,
                "calls": 9,
            }
        ]
    },
}
SPOOLED = {"bytes": 4096, "batches": 3, "oldest_s": 7.5}
FLOW = {"sent": 12, "failed": 1, "dropped": 2, "queued": 5}
SINKS = {
    "store": {"state": "", "dropped": 17, "bytes": 8192},
    "otlp": {"spool": SPOOLED, "traces": FLOW, "metrics": FLOW},
}
ENGINE_COUNTS = (
    *("steps", "batches", "sequences", "step_ns", "tokens", "recomputed", "prompt_tokens", "cached_tokens"),
    *("output_tokens", "preemptions", "evicted_blocks", "prompts"),
)
OTHER_COUNTS = [
    Count("request_codes", "chat", "ok/200", 997),
    Count("slo", "chat", "e2e/good", 31),
    Count("not_explained", "chat", "", 31),
    Count("throttled_us", "chat", "", 1_500_000),
    Count("bursts", "malloc", "done", 3),
]


def full_figures(make_finding: Callable[..., Finding]) -> Figures:
    """Return such figures; findings 1 and 3 are slow, 2 is not."""
    figures, tally = Figures(), Tally()
    found = [make_finding(1), make_finding(2, slow=False), make_finding(3, outcome="error", status=500)]
    for n, f in enumerate(found):
        tally.add(f.request, Objectives(), "opt")
        if n == 0:
            f.engine = EngineFacts(prompt_tokens=101, output_tokens=11, model="opt")
    tally.add(make_finding(4, first_ns=5_010_000_000).request, Objectives(), "opt")
    state = tally.state(5_100_000_000)
    figures.add(Status("i", COLLECTOR | state))
    figures.add(
        Counts("i", [*OTHER_COUNTS, *(Count(f"engine_{n}", "chat", "vllm", 7) for n in ENGINE_COUNTS)])
    )
    figures.add(Status(EXPORTER, {"cpu_s": 0.75, "rss_bytes": 60_000_000, "sinks": SINKS}))
    for f in found:
        figures.add(Explained(finding_id("i", f), 1_700_000_000_000_000_000, f))
    return figures
