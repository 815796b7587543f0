"""Every request appends to the server's log and fsyncs it, on a slow disk that nobody else uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from tests.demo.procs import DemoError
from tests.faults.host import loopdisk
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected
from tests.faults.host.saves import Saves

INSIDE = Saves()
_NAME, _BYTES = "serving.log", 1 << 16


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Log 64 KiB per request, to a disk that takes 320 to 450 KiB a second."""
    kib = hands.rng.randint(320, 450)
    with ExitStack() as undo:
        node, at = undo.enter_context(loopdisk.mounted(hands.folder, 64))
        undo.enter_context(loopdisk.slowed(node, write_bps=kib << 10))
        log = at / _NAME
        try:
            settings = {"path": str(log), "bytes": _BYTES, "append": True, "loop": hands.server == VLLM}
            await hands.switch("fsync_log", settings)

            def names(culprit: Culprit) -> bool:
                return str(culprit["name"]).endswith(_NAME)

            def bites() -> str:
                lines = log.stat().st_size // _BYTES
                if lines < 2:
                    raise DemoError(f"it does not bite: {lines} lines in the log")
                return f"{lines} log lines, each on the disk before its request went on, at {kib} KiB/s"

            yield Injected(names, bites)
        finally:
            await hands.switch("fsync_log", None)


FAULT = Fault("fsync_log", ("io.log_blocked",), inject, (HTTP, THREADED), per_s=3)
