"""Threads that keep a lock in turns, inside a server: what the faults of locks share. Compiles ``locks.c``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.demo.procs import DemoError, set_name
from tests.faults.host.fault import Culprit, Hands, Injected, Inside

_SOURCE = Path(__file__).with_name("locks.c")


def build(folder: Path) -> Path:
    """Return ``locks.c`` as a library in a folder."""
    path = folder / "liblocks.so"
    if not path.exists() or path.stat().st_mtime < _SOURCE.stat().st_mtime:
        subprocess.run(
            ["clang", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(path), str(_SOURCE)], check=True
        )
    return path


def library(path: str, *, keeps_gil: bool = False) -> Any:
    """Return the library with its results declared; ``keeps_gil``: calls do not let the interpreter lock go."""
    lib: Any = (ctypes.PyDLL if keeps_gil else ctypes.CDLL)(path)
    for name in ("take", "allocate", "touch"):
        getattr(lib, f"locks_{name}").restype = ctypes.c_double
    lib.locks_map.restype = ctypes.c_void_p
    return lib


class Keeper(Inside):
    """Threads that keep a lock for ``seconds`` and let it be for ``rest``, in turns; told in ``out``.

    A line for each keeper, its thread and name, and one for each wait of a request's, in ms.
    """

    name = "keeper"
    threads = 1

    def __init__(self) -> None:
        self.lib: Any = None
        self.settings: Mapping[str, Any] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, settings: Mapping[str, Any]) -> None:
        self.settings, self._stop = settings, threading.Event()
        self.prepare()
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(settings.get("threads", 1))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.finish()

    def prepare(self) -> None:
        """Load what is needed."""
        self.lib = library(self.settings["library"])

    def finish(self) -> None:
        """Let go what was prepared."""

    def keep(self, seconds: float) -> None:
        """Have the lock for so long."""
        raise NotImplementedError

    def tell(self, line: str) -> None:
        """Add a line to what is told."""
        fd = os.open(self.settings["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)

    def _run(self) -> None:
        set_name(self.name)
        self.tell(f"tid {threading.get_native_id()}")
        while not self._stop.is_set():
            self.keep(self.settings["seconds"])
            self._stop.wait(self.settings["rest"])


@asynccontextmanager
async def kept(hands: Hands, fault: str, least_ms: float, **settings: Any) -> AsyncIterator[Injected]:
    """Switch a Keeper on: it bites when a request waited for *least_ms* at least three times, as the server saw it."""
    # Judged when all cases are over: each has a file of its own.
    out, pid = hands.folder / f"{fault}-{time.monotonic_ns()}", hands.pids["server"][0]
    out.write_text("")
    path = build(hands.folder)
    settings = {"library": str(path), "out": str(out), **settings}
    await hands.switch(fault, settings)
    began = time.monotonic()
    try:

        def told(word: str) -> list[float]:
            lines = [line.split() for line in out.read_text().splitlines()]
            return [float(line[1]) for line in lines if line[0] == word]

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "thread" and culprit["tgid"] == pid and culprit["tid"] in told("tid")

        def bites() -> str:
            waits = [ms for ms in told("wait") if ms >= least_ms]
            if len(waits) < 3:
                raise DemoError(f"it does not bite: only {len(waits)} waits of {least_ms:.0f} ms or more")
            took = time.monotonic() - began
            return f"{len(waits)} waits of {sum(waits) / len(waits):.0f} ms on average in {took:.0f} s"

        yield Injected(names, bites)
    finally:
        await hands.switch(fault, None)
