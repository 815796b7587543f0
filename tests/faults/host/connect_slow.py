"""The server connects to a service for each request, and the first SYN of each connection is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import DemoError, stop
from tests.faults.host import netpeer
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Launch
from tests.faults.host.netcalls import Calls, took
from tests.faults.host.netdrop import counters, dropping

SYN_TIMEOUT_MS = 1000  # TCP_TIMEOUT_INIT


class Connects(Calls):
    """A connection per call."""

    def call(self) -> None:
        with socket.create_connection(("127.0.0.1", int(self.settings["port"]))) as end:
            end.sendall(b"x\n")
            end.recv(1)

    async def call_async(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.settings["port"]))
        writer.write(b"x\n")
        await reader.read(1)
        writer.close()


INSIDE = Connects()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Start the service and lose the SYNs, in the server's network namespace."""
    out, pid = hands.folder / "connect_slow", hands.pids["server"][0]
    service, port = netpeer.start(pid, hands.rest_cpu)
    try:
        with dropping(pid, hands.folder, port, syns=1):
            before = counters(pid)["RetransSegs"]
            await hands.switch("connect_slow", {"port": port, "loop": hands.server == HTTP, "out": str(out)})
            try:

                def names(culprit: Culprit) -> bool:
                    return culprit["kind"] == "peer" and f"port {port}" in str(culprit["name"])

                def bites() -> str:
                    again = counters(pid)["RetransSegs"] - before
                    if not again:
                        raise DemoError("no SYN was sent again")
                    return f"{took(out, SYN_TIMEOUT_MS * 0.9)}; {again} segments sent again"

                yield Injected(names, bites)
            finally:
                await hands.switch("connect_slow", None)
    finally:
        stop(service)


FAULT = Fault(
    "connect_slow",
    ("net.connection_setup",),
    inject,
    (HTTP, THREADED),
    launch=Launch(netns=True),
    seconds=6.0,
    per_s=4,
)
