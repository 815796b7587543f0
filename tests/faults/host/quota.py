"""A CPU quota on the server's cgroup, below what it uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.cgroups import CpuGroup
from tests.demo.procs import DemoError
from tests.faults.host import proofs
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Measure what it uses for a second, and allow a part of that."""
    everybody = [pid for role in ("server", "core", "worker") for pid in hands.pids.get(role, ())]
    used = proofs.Cpu(everybody)
    await asyncio.sleep(1.0)
    # vLLM spins: what it uses says little of what it needs.
    share = hands.rng.uniform(0.45, 0.55) if hands.server == VLLM else hands.rng.uniform(0.6, 0.8)
    quota = used.ratio() * share
    group = CpuGroup(f"bench-{hands.server}")
    before = group.throttled_count()
    group.set_quota(quota)
    try:

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "cgroup" and str(culprit["name"]).rstrip("/").endswith(group.path)

        def bites() -> str:
            count = group.throttled_count() - before
            if count < 3:
                raise DemoError(f"the quota does not bite: throttled in {count} periods")
            return f"quota {quota:.2f} CPUs of {used.ratio():.2f} used; throttled in {count} periods"

        yield Injected(names, bites)
    finally:
        group.set_quota(None)


FAULT = Fault("quota", ("cpu.throttled",), inject, (HTTP, THREADED, VLLM))
