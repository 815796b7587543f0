"""A full garbage collection over a large live heap inside every request, on its loop or on its worker thread."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, VLLM, Culprit, Fault, Hands, Injected, Inside

_PIECE = 50_000
_MOST = 4_000_000


class Pauses(Inside):
    """Keeps enough small lists that a collection takes the time wanted, and collects before every request."""

    def __init__(self) -> None:
        self.heap: list[list[int]] = []
        self.where = ""
        self.out = -1
        self.begun = 0

    def start(self, settings: Mapping[str, Any]) -> None:
        wanted_ns, self.where = float(settings["seconds"]) * 1e9, str(settings["where"])
        enabled = gc.isenabled()
        gc.disable()
        try:
            took = 0
            while took < wanted_ns and len(self.heap) < _MOST:
                more = max(_PIECE, int(len(self.heap) * (wanted_ns / took - 1))) if took else 4 * _PIECE
                self.heap += [[number] for number in range(min(more, _MOST))]
                begin = time.monotonic_ns()
                gc.collect()
                took = time.monotonic_ns() - begin
        finally:
            if enabled:
                gc.enable()
        self.out = os.open(settings["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        gc.callbacks.append(self._told)

    def _told(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self.begun = time.monotonic_ns()
        elif info["generation"] == 2:
            os.write(self.out, f"{time.monotonic_ns() - self.begun}\n".encode())

    def stop(self) -> None:
        gc.callbacks.remove(self._told)
        os.close(self.out)
        self.heap.clear()

    async def on_loop(self) -> None:
        if self.where == "loop":
            gc.collect()

    def on_worker(self) -> None:
        if self.where == "worker":
            gc.collect()


INSIDE = Pauses()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Collect for 70 to 110 ms in every request."""
    seconds = hands.rng.uniform(0.07, 0.11)
    where = {THREADED: "worker", VLLM: "loop"}.get(hands.server) or hands.rng.choice(["loop", "worker"])
    pid, out = hands.pids["server"][0], hands.folder / "gc_pause"
    await hands.switch("gc_pause", {"seconds": seconds, "where": where, "out": str(out)})
    try:

        def names(culprit: Culprit) -> bool:
            return bool(culprit["kind"] == "thread" and culprit["tgid"] == pid)

        def bites() -> str:
            took = [int(line) / 1e6 for line in out.read_text().split()]
            if len(took) < 3 or max(took) < seconds * 500:
                raise DemoError(f"it does not collect for long: {took}")
            return f"{len(took)} full collections on the {where} thread, {sum(took) / len(took):.0f} ms on average"

        yield Injected(names, bites)
    finally:
        await hands.switch("gc_pause", None)


FAULT = Fault(
    "gc_pause",
    ("python.gc",),
    inject,
    (HTTP, THREADED, VLLM),
    per_s=4,
    code=("Pauses.on_loop", "Pauses.on_worker"),
)
