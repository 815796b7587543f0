"""Other processes keep the disk busy on which every request saves a record."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from tests.demo.procs import DemoError, python, spawn, stop
from tests.faults.host import loopdisk
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected
from tests.faults.host.saves import Saves

INSIDE = Saves()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Let three or four processes write past the page cache."""
    with ExitStack() as undo:
        node, at = undo.enter_context(loopdisk.mounted(hands.folder, 400))
        pids = set()
        for i in range(hands.rng.randint(3, 4)):
            writer = spawn(python("tests.bpf.fsync_server", "fill", at / f"checkpoint{i}"), hands.rest_cpu)
            undo.callback(stop, writer)
            pids.add(writer.pid)
        busy, began_s = loopdisk.busy_ms(node), time.monotonic()
        try:
            settings = {"path": str(at / "records.db"), "bytes": 1 << 16, "loop": hands.server == VLLM}
            await hands.switch("disk_neighbour", settings)

            def names(culprit: Culprit) -> bool:
                return culprit["tgid"] in pids

            def bites() -> str:
                queue = (loopdisk.busy_ms(node) - busy) / 1000 / (time.monotonic() - began_s)
                if queue < 1.5:
                    raise DemoError(f"it does not bite: {queue:.1f} requests in the disk on average")
                return f"{len(pids)} writers, {queue:.1f} requests in the disk on average"

            yield Injected(names, bites)
        finally:
            await hands.switch("disk_neighbour", None)


FAULT = Fault("disk_neighbour", ("io.disk_contention",), inject, (HTTP, THREADED), per_s=4)
