"""What the network's faults do inside a server: a call to a peer before each request, timed there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host.fault import Inside


class Calls(Inside):
    """Calls a peer before each request; ``settings["loop"]``: from the event loop, else on the thread that works."""

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] = {}
        self._out: Any = None

    def start(self, settings: Mapping[str, Any]) -> None:
        self._out = open(settings["out"], "w", buffering=1, encoding="ascii")  # noqa: SIM115
        self.settings = settings

    def stop(self) -> None:
        self.settings = {}
        self._out.close()

    async def call_async(self) -> None:
        """Call from the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.call)

    def call(self) -> None:
        """Call from a thread."""
        raise NotImplementedError

    async def on_loop(self) -> None:
        if self.settings.get("loop"):
            begin = time.monotonic()
            await self.call_async()
            self._note(begin)

    def on_worker(self) -> None:
        if self.settings and not self.settings["loop"]:
            begin = time.monotonic()
            self.call()
            self._note(begin)

    def _note(self, begin: float) -> None:
        if not self._out.closed:
            self._out.write(f"{time.monotonic() - begin:.6f}\n")


def took(out: Path, least_ms: float) -> str:
    """Say how long the calls took in the server, by its own clock.

    Raises:
        DemoError: they were too short, or too few.
    """
    times = sorted(float(line) * 1000 for line in out.read_text().split())
    middle = times[len(times) // 2] if times else 0.0
    if middle < least_ms:
        raise DemoError(f"it does not bite: {len(times)} calls, {middle:.0f} ms in the middle")
    return f"{len(times)} calls, {middle:.0f} ms in the middle"
