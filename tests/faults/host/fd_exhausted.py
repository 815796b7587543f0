"""A server that runs out of descriptors again and again: it cannot accept, and tries again a second later."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, Culprit, Fault, Hands, Injected, Inside

_ROOM = 40  # descriptors left under the lowered limit
_SAID = "out of system resource"  # asyncio's own words, when accept() fails


class Eater(Inside):
    """Takes every descriptor there is, for a part of the time."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, settings: Mapping[str, Any]) -> None:
        self.ended.clear()
        self.thread = threading.Thread(
            target=self._run, args=(float(settings["full_s"]), float(settings["free_s"]))
        )
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self, full_s: float, free_s: float) -> None:
        while not self.ended.is_set():
            taken: list[int] = []
            try:
                # Those that others give back meanwhile are taken, too.
                for _ in range(max(int(full_s / 0.005), 1)):
                    try:
                        while True:
                            taken.append(os.dup(2))
                    except OSError:
                        pass
                    if self.ended.wait(0.005):
                        break
            finally:
                for fd in taken:
                    os.close(fd)
            self.ended.wait(free_s)


INSIDE = Eater()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Lower the limit to what is open and some more, and take those."""
    pid = hands.pids["server"][0]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    opened = len(os.listdir(f"/proc/{pid}/fd"))
    log = hands.folder / "server.log"
    said = log.read_text(errors="replace").count(_SAID) if log.exists() else 0
    full_s, free_s = hands.rng.uniform(0.25, 0.4), hands.rng.uniform(1.4, 1.9)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + _ROOM, before[1]))
    try:
        await hands.switch("fd_exhausted", {"full_s": full_s, "free_s": free_s})
        try:

            def names(culprit: Culprit) -> bool:
                return bool(culprit["kind"] == "process" and culprit["tgid"] == pid)

            def bites() -> str:
                failed = log.read_text(errors="replace").count(_SAID) - said
                if not failed:
                    raise DemoError("accept() never failed for lack of a descriptor")
                return f"limit {opened + _ROOM}; the server says {failed} times that it cannot accept"

            yield Injected(names, bites)
        finally:
            await hands.switch("fd_exhausted", None)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


FAULT = Fault("fd_exhausted", ("python.fd_exhausted",), inject, (HTTP,), seconds=6.0)
