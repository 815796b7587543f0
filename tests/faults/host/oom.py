"""A helper that requests need is killed by the OOM killer, being over the limit of its memory cgroup, each time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Inside
from tests.faults.host.groups import MemoryGroup

NAME = "bench-helper"
#: Joins the group first, then takes memory, and would answer if it ever got all of it.
HELPER = f"""\
import mmap, os, sys
folder, mib = sys.argv[1], int(sys.argv[2])
open("/proc/self/comm", "w").write({NAME!r})
open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
memory = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
print("done")
"""


class NoAnswerError(ConnectionError):
    """The helper ended without an answer."""


class INSIDE(Inside):
    """Asks the helper."""

    def __init__(self) -> None:
        self._command: list[str] = []
        self._threaded = False

    def start(self, settings: Mapping[str, Any]) -> None:
        """Remember what to run."""
        self._threaded = settings["server"] == THREADED
        python = [sys.executable, "-S", "-E", "-c", HELPER]
        self._command = [*python, settings["folder"], str(settings["mib"])]

    async def on_loop(self) -> None:
        """Ask it and wait for its answer.

        Raises:
            NoAnswerError: there is none.
        """
        asked = await asyncio.create_subprocess_exec(*self._command, stdout=subprocess.PIPE)
        answer, _ = await asked.communicate()
        if not answer:
            raise NoAnswerError

    def on_worker(self) -> None:
        """The same, where requests have a thread each.

        Raises:
            NoAnswerError: there is none.
        """
        if self._threaded and not subprocess.run(self._command, stdout=subprocess.PIPE, check=False).stdout:
            raise NoAnswerError


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """A group for the helper with a limit that it goes far beyond."""
    limit = hands.rng.randint(40, 80) << 20
    group = MemoryGroup("bench-oom", limit)
    try:
        settings = {"server": hands.server, "folder": str(group.folder), "mib": 4 * limit >> 20}
        await hands.switch("oom", settings)

        def names(culprit: Culprit) -> bool:
            return bool(culprit["kind"] == "process" and culprit["name"] == NAME)

        def bites() -> str:
            kills = group.kills()
            if kills < 5:
                raise DemoError(f"it does not bite: {kills} processes killed")
            return f"limit {limit >> 20} MiB; {kills} processes killed for it"

        yield Injected(names, bites)
    finally:
        await hands.switch("oom", None)
        group.remove()


FAULT = Fault("oom", ("memory.oom",), inject, (HTTP, THREADED), per_s=4.0, failing=True)
