"""Whoever accepts connections is slow, and the listen queue is short: it is full all the time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.demo.procs import DemoError
from tests.faults.host.fault import THREADED, Culprit, Fault, Hands, Injected, Inside, Launch
from tests.faults.host.netdrop import counters

BACKLOG = 3
#: Clients that were refused come back after 1 and 3 s: the last of them, too, find it slow.
_COME_BACK_S = 3.2


class SlowAcceptor(Inside):
    """Sleeps before each accept, as a thread does that looks up or checks something of every client first."""

    def __init__(self) -> None:
        self._usual = socket.socket.accept

    def start(self, settings: Mapping[str, Any]) -> None:
        usual, slow_s = self._usual, float(settings["slow_s"])

        def accept(self: socket.socket) -> Any:
            time.sleep(slow_s)
            return usual(self)

        socket.socket.accept = accept  # type: ignore[method-assign]

    def stop(self) -> None:
        socket.socket.accept = self._usual  # type: ignore[method-assign]


INSIDE = SlowAcceptor()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Make it slower than connections come."""
    slow_s, pid = hands.rng.uniform(0.068, 0.076), hands.pids["server"][0]
    before = counters(pid)["ListenOverflows"]
    await hands.switch("accept_overflow", {"slow_s": slow_s})
    # Full from the start: what waits before that waits for a slow thread only.
    fillers = [socket.create_connection((hands.host, hands.port)) for _ in range(BACKLOG + 1)]
    try:

        def names(culprit: Culprit) -> bool:
            return bool(culprit["tgid"] == pid)

        def bites() -> str:
            refused = counters(pid)["ListenOverflows"] - before
            if not refused:
                raise DemoError("the listen queue did not overflow")
            return f"{slow_s * 1000:.0f} ms per accept; {refused} SYNs refused"

        yield Injected(names, bites)
    finally:
        for filler in fillers:
            filler.close()
        await asyncio.sleep(_COME_BACK_S)
        await hands.switch("accept_overflow", None)


FAULT = Fault(
    "accept_overflow",
    ("net.accept_overflow", "net.transport"),
    inject,
    (THREADED,),
    launch=Launch(args=("--backlog", str(BACKLOG)), netns=True),
    per_s=17,
)
