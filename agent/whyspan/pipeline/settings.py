"""Settings of the engine, live or recorded, and of the probes, out of the configuration."""

from __future__ import annotations

from pathlib import Path

from whyspan_probes.errors import BtfFileError
from whyspan_probes.kernel_btf import KernelBtf

from whyspan.config import Collector, Slo
from whyspan.engine import Settings
from whyspan.errors import ConfigError


def engine_settings(slo: Slo, collector: Collector, instance: str) -> Settings:
    """Return what the engine is told; *instance* names the run, and ids that it generates derive from it."""
    return Settings(
        objectives=slo.objectives,
        instance=instance,
        explain_per_s=collector.explain_per_s,
        ordinary_per_s=collector.ordinary_per_s,
        window_ns=collector.window_s * 1_000_000_000,
        recorder_bytes=collector.recorder_mb << 20,
        template_allow=frozenset(collector.template_allow),
    )


def kernel_btf(file: str) -> KernelBtf:
    """Return the BTF that the probes go by, with ``collector.btf`` given; an empty string is none.

    Raises:
        ConfigError: the configured file cannot serve.
    """
    try:
        return KernelBtf.find(Path(file) if file else None)
    except BtfFileError as e:
        raise ConfigError(f"collector.btf: {e}") from e
