"""Weights that are mapped, not in memory, and on a slow disk: every request reads a few pages of them by faults."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from tests.demo.procs import DemoError
from tests.faults.host import loopdisk
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected
from tests.faults.host.touches import Touches

INSIDE = Touches()
_BYTES = 48 << 20
_NAME = "model-00001-of-00001.safetensors"


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Make the file on a loop device of 20 to 30 requests a second."""
    pid = hands.pids["server"][0]
    iops, count = hands.rng.randint(20, 30), 4
    with ExitStack() as undo:
        node, at = undo.enter_context(loopdisk.mounted(hands.folder, 96))
        weights = at / _NAME
        with weights.open("wb") as f:
            f.write(os.urandom(_BYTES))
            os.fsync(f.fileno())
        undo.enter_context(loopdisk.slowed(node, read_iops=iops))
        before = loopdisk.major_faults(pid)
        try:
            settings = {"path": str(weights), "count": count, "loop": hands.server == VLLM}
            await hands.switch("mmap_cold", settings)

            def names(culprit: Culprit) -> bool:
                return bool(culprit["kind"] == "file" and str(culprit["name"]).endswith(_NAME))

            def bites() -> str:
                faults = loopdisk.major_faults(pid) - before
                if faults < 2 * count:
                    raise DemoError(f"it does not bite: {faults} major faults")
                return f"{faults} major faults, {count} per request, disk at {iops} reads/s"

            yield Injected(names, bites)
        finally:
            await hands.switch("mmap_cold", None)


FAULT = Fault("mmap_cold", ("memory.mmap_faults",), inject, (HTTP, THREADED), per_s=3)
