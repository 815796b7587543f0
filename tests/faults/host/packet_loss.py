"""Packets of the responses are lost on their way to the clients; they are large enough to wait for room."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import DemoError
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Launch
from tests.faults.host.netdrop import counters, dropping

CHUNK, BUFFER = 60_000, 1 << 14
DEVICE = "wb1i"  # the server's end of the pair, netns.py
_FEW = 10


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Lose some of the packets that leave the server's network namespace."""
    percent, pid = hands.rng.randint(6, 12), hands.pids["server"][0]
    with dropping(pid, hands.folder, hands.port, percent=percent, device=DEVICE, way="egress"):
        before = counters(pid)

        def names(culprit: Culprit) -> bool:
            return culprit["kind"] == "peer" and str(culprit["name"]).startswith("client at port ")

        def bites() -> str:
            after = counters(pid)
            again, timeouts = (after[n] - before[n] for n in ("RetransSegs", "TCPTimeouts"))
            if again < _FEW:
                raise DemoError(f"only {again} segments were sent again")
            return f"{percent}% lost: {again} segments sent again, {timeouts} time-outs"

        yield Injected(names, bites)


FAULT = Fault(
    "packet_loss",
    ("net.loss", "net.transport"),
    inject,
    (HTTP, THREADED),
    launch=Launch(args=("--send-buffer", str(BUFFER)), netns=True),
    per_s=3,
    victim={"chunk_bytes": CHUNK},
)
