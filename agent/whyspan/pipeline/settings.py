"""The engine's settings out of the configuration, live or recorded."""

from __future__ import annotations

from whyspan.config import Collector, Slo
from whyspan.engine import Settings


def engine_settings(slo: Slo, collector: Collector, instance: str) -> Settings:
    """Return what the engine is told; *instance* names the run, and ids that it generates derive from it."""
    return Settings(
        objectives=slo.objectives,
        instance=instance,
        explain_per_s=collector.explain_per_s,
        ordinary_per_s=collector.ordinary_per_s,
        window_ns=collector.window_s * 1_000_000_000,
        recorder_bytes=collector.recorder_mb << 20,
    )
