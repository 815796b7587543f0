"""A client's pool of few connections to a service that is slow for others: requests wait for one that is free."""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.demo.procs import DemoError, python, spawn, stop
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Inside

CONNECTIONS = 3
_OWN_MS = 2.0


class Pool(Inside):
    """Asks the service before every request; background work keeps one call more going than there are connections."""

    def __init__(self) -> None:
        self.free: queue.Queue[socket.socket] = queue.Queue()
        self.all: list[socket.socket] = []
        self.streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.threads: list[threading.Thread] = []
        self.ended = threading.Event()
        self.out: Any = None

    def start(self, settings: Mapping[str, Any]) -> None:
        self.ended.clear()
        self.out = open(settings["out"], "w", buffering=1, encoding="ascii")  # noqa: SIM115
        address, slow_ms = ("127.0.0.1", int(settings["port"])), float(settings["slow_ms"])
        self.all = [socket.create_connection(address) for _ in range(CONNECTIONS)]
        for end in self.all:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        holders = CONNECTIONS + 1
        if settings["loop"]:
            self.streams = asyncio.Queue()
            self.tasks = [asyncio.ensure_future(self._fill())]
            self.tasks += [asyncio.ensure_future(self._hold(slow_ms)) for _ in range(holders)]
            return
        for end in self.all:
            self.free.put(end)
        self.threads = [threading.Thread(target=self._hold_thread, args=(slow_ms,)) for _ in range(holders)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.ended.set()
        for task in self.tasks:
            task.cancel()
        for thread in self.threads:
            thread.join()
        for end in self.all:
            end.close()
        self.tasks, self.threads, self.all, self.streams, self.free = [], [], [], None, queue.Queue()
        self.out.close()

    async def _fill(self) -> None:
        assert self.streams is not None
        for end in self.all:
            end.setblocking(False)
            self.streams.put_nowait(await asyncio.open_connection(sock=end))

    async def _ask(self, ms: float) -> float:
        assert self.streams is not None
        streams, begin = self.streams, time.monotonic()
        reader, writer = await streams.get()
        waited = time.monotonic() - begin
        try:
            writer.write(f"{ms}\n".encode())
            await reader.readline()
        finally:
            streams.put_nowait((reader, writer))
        return waited

    def _ask_thread(self, ms: float) -> float:
        begin = time.monotonic()
        end = self.free.get()
        waited = time.monotonic() - begin
        try:
            end.sendall(f"{ms}\n".encode())
            end.recv(16)
        finally:
            self.free.put(end)
        return waited

    async def _hold(self, ms: float) -> None:
        while not self.ended.is_set():
            await self._ask(ms)
            await asyncio.sleep(0)  # else it takes its slot again before whoever was told of it

    def _hold_thread(self, ms: float) -> None:
        while not self.ended.is_set():
            self._ask_thread(ms)
            time.sleep(0.001)

    async def on_loop(self) -> None:
        if self.streams is not None:
            self.out.write(f"{await self._ask(_OWN_MS):.6f}\n")

    def on_worker(self) -> None:
        if self.threads:
            self.out.write(f"{self._ask_thread(_OWN_MS):.6f}\n")


INSIDE = Pool()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Start the service, and let it be slow for the background work."""
    slow_ms = hands.rng.uniform(110, 170)
    pid, out = hands.pids["server"][0], hands.folder / "pool_connections"
    service = spawn(python("tests.faults.host.upstream"), hands.rest_cpu, stdout=subprocess.PIPE)
    try:
        assert service.stdout is not None
        port = int(service.stdout.readline())
        on_loop = hands.server == HTTP
        settings = {"port": port, "slow_ms": slow_ms, "loop": on_loop, "out": str(out)}
        await hands.switch("pool_connections", settings)
        try:

            def names(culprit: Culprit) -> bool:
                return culprit["tgid"] == pid and f"port {port}" in culprit["name"]

            def bites() -> str:
                waits = [float(line) * 1000 for line in out.read_text().split()]
                if len(waits) < 3 or sum(waits) / len(waits) < 20:
                    raise DemoError(f"nobody waits for a connection: {waits}")
                return f"{len(waits)} waits for one of {CONNECTIONS} connections, {sum(waits) / len(waits):.0f} ms each"

            yield Injected(names, bites)
        finally:
            await hands.switch("pool_connections", None)
    finally:
        stop(service)


FAULT = Fault("pool_connections", ("python.pool_exhausted",), inject, (HTTP, THREADED), per_s=4)
