"""Memory that every request needs is swapped out, to a slow disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from tests.demo.procs import DemoError
from tests.faults.host import loopdisk
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected
from tests.faults.host.groups import MemoryGroup
from tests.faults.host.touches import Touches

INSIDE = Touches()
_BYTES = 12 << 20


def _home(pid: int) -> str:
    lines = (line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    return next(path for _, names, path in lines if "memory" in names.split(","))


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Charge a buffer of the server to a group that is emptied again and again, into swap of 20 to 30 reads/s."""
    pid = hands.pids["server"][0]
    iops, count = hands.rng.randint(20, 30), 4
    with ExitStack() as undo:
        group = MemoryGroup("swapped", 0)
        undo.callback(group.remove)
        if group.version != 1:
            raise DemoError("needs the memory controller of cgroup v1")
        node = undo.enter_context(loopdisk.swap(hands.folder, 32))
        before = loopdisk.major_faults(pid)
        home = group.folder.parents[1] / _home(pid).lstrip("/")
        settings = {"bytes": _BYTES, "count": count, "loop": hands.server == VLLM}
        # Pages stay charged to the group that a process was in when it got them.
        (group.folder / "cgroup.procs").write_text(str(pid))
        try:
            await hands.switch("swap_in", settings)
        finally:
            (home / "cgroup.procs").write_text(str(pid))

        def empty() -> None:
            with suppress(OSError):
                (group.folder / "memory.force_empty").write_text("0")

        async def evict() -> None:
            while True:
                await asyncio.to_thread(empty)
                await asyncio.sleep(0.3)

        task = None
        try:
            await asyncio.to_thread(empty)
            undo.enter_context(loopdisk.slowed(node, read_iops=iops))
            task = asyncio.ensure_future(evict())

            def names(culprit: Culprit) -> bool:
                return culprit["tgid"] == pid or str(culprit["name"]).endswith(group.path)

            def bites() -> str:
                faults = loopdisk.major_faults(pid) - before
                if faults < 2 * count:
                    raise DemoError(f"it does not bite: {faults} major faults")
                return f"{faults} major faults, {count} per request, swap at {iops} reads/s"

            yield Injected(names, bites)
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            with suppress(Exception):  # a server that is gone has nothing left in swap
                await hands.switch("swap_in", None)


FAULT = Fault("swap_in", ("memory.swap",), inject, (HTTP, THREADED), per_s=3)
