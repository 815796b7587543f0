"""The server asks a service by two small writes, without TCP_NODELAY; the service's kernel delays its ACKs."""

from __future__ import annotations

import asyncio
import queue
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.demo.procs import DemoError, stop
from tests.faults.host import netpeer
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Launch
from tests.faults.host.netcalls import Calls, took
from tests.faults.host.netdrop import counters

DELAYED_ACK_MS = 40  # TCP_DELACK_MIN
_CONNECTIONS = 8
_WARM = 20  # a new connection is acknowledged at once for a while

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pairs(Calls):
    """Some exchanges on a connection that is kept, each of two writes."""

    def __init__(self) -> None:
        super().__init__()
        self.free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.streams: list[Streams] = []

    def start(self, settings: Mapping[str, Any]) -> None:
        super().start(settings)
        self.free, self.streams = queue.SimpleQueue(), []
        for end in [self.connect() for _ in range(_CONNECTIONS)]:
            self.free.put(end)

    def connect(self) -> socket.socket:
        """Return a connection that has been in use."""
        try:
            return self.free.get_nowait()
        except queue.Empty:
            end = socket.create_connection(("127.0.0.1", int(self.settings["port"])))
            for _ in range(_WARM):
                end.sendall(b"hb\n")
                end.recv(1)
            return end

    def call(self) -> None:
        end = self.connect()
        for _ in range(int(self.settings["exchanges"])):
            end.send(b"head")
            end.send(b"body\n")
            end.recv(1)
        self.free.put(end)

    async def call_async(self) -> None:
        if self.streams:
            reader, writer = self.streams.pop()
        else:
            end = self.connect()
            end.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=end)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)  # asyncio sets it
        for _ in range(int(self.settings["exchanges"])):
            writer.write(b"head")
            writer.write(b"body\n")
            await reader.read(1)
        self.streams.append((reader, writer))


INSIDE = Pairs()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Start the service in the server's network namespace."""
    out, pid, exchanges = hands.folder / "nagle", hands.pids["server"][0], hands.rng.randint(2, 4)
    service, port = netpeer.start(pid, hands.rest_cpu)
    try:
        before = counters(pid)["DelayedACKs"]
        settings = {"port": port, "loop": hands.server == HTTP, "out": str(out), "exchanges": exchanges}
        await hands.switch("nagle", settings)
        try:

            def names(culprit: Culprit) -> bool:
                return culprit["kind"] == "peer" and f"port {port}" in str(culprit["name"])

            def bites() -> str:
                delayed = counters(pid)["DelayedACKs"] - before
                if not delayed:
                    raise DemoError("no acknowledgement was delayed")
                return f"{took(out, exchanges * DELAYED_ACK_MS * 0.8)}; {delayed} delayed acknowledgements"

            yield Injected(names, bites)
        finally:
            await hands.switch("nagle", None)
    finally:
        stop(service)


FAULT = Fault("nagle", ("net.nagle", "net.transport"), inject, (HTTP, THREADED), launch=Launch(netns=True))
