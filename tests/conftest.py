"""Tiers: a test that lacks its privilege or its server is skipped with the reason, unless it is required.

``WHYSPAN_REQUIRE=bpf,engine,boards,page,package,vm`` turns the skips of these tiers into failures, so that continuous
integration cannot pass by skipping.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.boards import tools
from tests.engine import install
from tests.package import builds
from tests.page import tools as page_tools
from tests.vm import guest

# Limits in seconds belong to the bench: a busy machine is no failure.
settings.register_profile("whyspan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whyspan")

BTF = Path("/sys/kernel/btf/vmlinux")


def required_tiers(value: str | None) -> frozenset[str]:
    """The tiers named in ``WHYSPAN_REQUIRE``."""
    return frozenset(name.strip() for name in (value or "").split(",") if name.strip())


def lacking(tier: str) -> str:
    """Why a tier cannot run here; empty when it can."""
    if tier == "bpf":
        if os.geteuid() != 0:
            return "needs root: BPF programs are loaded"
        if not BTF.exists():
            return f"needs a kernel with BTF: {BTF} is missing"
    if tier == "engine":
        if os.geteuid() != 0:
            return "needs root: BPF programs are loaded"
        if not install.installed():
            return "needs a real vLLM server: `make vllm` installs it"
    if tier == "boards":
        return tools.lacking()
    if tier == "page":
        return page_tools.lacking()
    if tier == "package":
        return builds.lacking()
    if tier == "vm":
        return guest.lacking()
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail when the tier is required."""
    for tier in ("bpf", "engine", "boards", "page", "package", "vm"):
        if item.get_closest_marker(tier) is None:
            continue
        reason = lacking(tier)
        if reason and tier in required_tiers(os.environ.get("WHYSPAN_REQUIRE")):
            pytest.fail(f"WHYSPAN_REQUIRE has {tier}, but it {reason}", pytrace=False)
        if reason:
            pytest.skip(reason)
