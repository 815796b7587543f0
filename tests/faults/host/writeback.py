"""Another process leaves much dirty data on the file system on which every request saves a small record.

Without delayed allocation the journal's commit, for which an fsync waits, writes all of it first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from tests.demo.procs import DemoError, python, spawn, stop
from tests.faults.host import loopdisk
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected
from tests.faults.host.saves import Saves

INSIDE = Saves()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Dirty 3 to 5 MB every 0.25 s on a disk that writes 24 MB a second."""
    megabytes = hands.rng.randint(3, 5)
    with ExitStack() as undo:
        node, at = undo.enter_context(loopdisk.mounted(hands.folder, 128, "nodelalloc"))
        undo.enter_context(loopdisk.slowed(node, write_bps=24 << 20))
        dirty = at / "snapshot.bin"
        writer = spawn(python("tests.faults.host.dirty", dirty, megabytes), hands.rest_cpu)
        undo.callback(stop, writer)
        pid = writer.pid
        before = loopdisk.sectors_written(node)
        try:
            settings = {"path": str(at / "records.db"), "bytes": 4096, "loop": hands.server == VLLM}
            await hands.switch("writeback", settings)

            def names(culprit: Culprit) -> bool:
                return culprit["tgid"] == pid or str(culprit["name"]).endswith(dirty.name)

            def bites() -> str:
                written = (loopdisk.sectors_written(node) - before) * 512 / 1e6
                if written < 2 * megabytes:
                    raise DemoError(f"it does not bite: {written:.1f} MB written back")
                return f"{written:.0f} MB written back, {megabytes} MB dirtied at a time"

            yield Injected(names, bites)
        finally:
            await hands.switch("writeback", None)


FAULT = Fault("writeback", ("io.writeback",), inject, (HTTP, THREADED), per_s=4)
