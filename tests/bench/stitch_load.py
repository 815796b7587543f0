"""Stitching workload: many concurrent requests, keep-alive and pipelined, with the truth written down.

``--out`` gets one JSON line per request: ``lport`` and ``rport`` (the client's and the server's port), ``seq``
(position on the connection, from 0), ``traceparent`` (as sent, or null), ``valid`` (whether it is one by W3C),
``trace_id`` (when valid), ``request_id``, ``route``, ``method``, ``pipelined``, ``sent_ns``, ``end_ns``
(CLOCK_MONOTONIC), ``status``. Ids are random, in random order; the seed makes the requests repeatable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ABSENT_RATIO = 0.15
MALFORMED_RATIO = 0.15
TIMEOUT_S = 60.0


@dataclass
class Sent:
    """The truth about one request."""

    request_id: str
    route: str
    method: str
    traceparent: str | None
    valid: bool
    trace_id: str | None
    pipelined: bool
    lport: int = 0
    rport: int = 0
    seq: int = 0
    sent_ns: int = 0
    end_ns: int = 0
    status: int = 0


def malformed(rng: random.Random, trace: str, span: str) -> str:
    """A traceparent that W3C Trace Context says to ignore."""
    return rng.choice(
        [
            f"00-{'0' * 32}-{span}-01",  # all-zero trace id
            f"00-{trace}-{'0' * 16}-01",  # all-zero span id
            f"ff-{trace}-{span}-01",  # forbidden version
            f"00-{trace[:31]}-{span}-01",  # too short
            f"00-{trace.upper()[:-1]}G-{span}-01",  # not hexadecimal
            f"00-{trace}-{span}-01-extra",  # version 00 has four fields
            f"00-{trace}-{span}",  # no flags
            "not a traceparent",
        ]
    )


def plan(rng: random.Random, count: int, pipelined: bool) -> list[Sent]:
    """``count`` requests in random order; times and ports are filled in when they are sent."""
    out = []
    for _ in range(count):
        trace, span = f"{rng.getrandbits(128) | 1:032x}", f"{rng.getrandbits(64) | 1:016x}"
        draw = rng.random()
        parent: str | None = f"00-{trace}-{span}-{rng.choice(['00', '01'])}"
        if draw < ABSENT_RATIO:
            parent = None
        elif draw < ABSENT_RATIO + MALFORMED_RATIO:
            parent = malformed(rng, trace, span)
        valid = draw >= ABSENT_RATIO + MALFORMED_RATIO
        out.append(
            Sent(
                request_id=f"req-{rng.getrandbits(48):012x}",
                route=f"/v1/wait/{rng.randrange(0, 200)}",
                method=rng.choice(["GET", "POST"]),
                traceparent=parent,
                valid=valid,
                trace_id=trace if valid else None,
                pipelined=pipelined,
            )
        )
    rng.shuffle(out)
    return out


def encode(sent: Sent, port: int, rng: random.Random) -> bytes:
    """The request on the wire, its headers in random order and header names in random case."""
    body = b'{"prompt":"' + b"x" * rng.randrange(0, 400) + b'"}' if sent.method == "POST" else b""
    headers = [("host", f"127.0.0.1:{port}"), ("x-request-id", sent.request_id), ("user-agent", "stitch")]
    if sent.traceparent is not None:
        headers.append(("traceparent", sent.traceparent))
    if body:
        headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
    rng.shuffle(headers)
    lines = [f"{rng.choice([name, name.title()])}: {value}" for name, value in headers]
    head = f"{sent.method} {sent.route}?token=secret HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + body


@dataclass
class Connection:
    """One connection and the requests it will carry, in order."""

    port: int
    requests: list[Sent]
    rng: random.Random
    window: int  # requests in flight at once; 1 is plain keep-alive
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.window)

    async def run(self, start: asyncio.Event) -> None:
        """Send everything and read every response.

        Raises:
            OSError, asyncio.IncompleteReadError: the server closed the connection early.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lport = writer.get_extra_info("sockname")[1]
        await start.wait()
        reading = asyncio.create_task(self._read(reader))
        for seq, sent in enumerate(self.requests):
            await self._slots.acquire()
            sent.lport, sent.rport, sent.seq = lport, self.port, seq
            sent.sent_ns = time.monotonic_ns()
            writer.write(encode(sent, self.port, self.rng))
            await writer.drain()
        await asyncio.wait_for(reading, TIMEOUT_S)
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        for sent in self.requests:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = await reader.readexactly(length)
            sent.status, sent.end_ns = int(head[9:12]), time.monotonic_ns()
            # Responses come in the order of the requests, so the echo proves that position means what we say.
            assert json.loads(body)["request_id"] == sent.request_id
            self._slots.release()


async def drive(ports: list[int], concurrency: int, per_connection: int, depth: int, seed: int) -> list[Sent]:
    """Run the workload; ``concurrency`` requests are in flight over all servers.

    Half of the requests in flight are on pipelined connections, ``depth`` on each; the others have one
    connection each. Every connection carries ``per_connection`` requests, times ``depth`` if pipelined.
    """
    rng = random.Random(seed)
    connections = []
    singles, pipes = concurrency // 2, math.ceil(concurrency / 2 / depth)
    for index in range(singles + pipes):
        window = 1 if index < singles else depth
        requests = plan(rng, per_connection * window, window > 1)
        connections.append(
            Connection(ports[index % len(ports)], requests, random.Random(rng.random()), window)
        )
    rng.shuffle(connections)
    start = asyncio.Event()
    tasks = [asyncio.create_task(c.run(start)) for c in connections]
    await asyncio.sleep(1.0)
    start.set()
    await asyncio.gather(*tasks)
    return [sent for c in connections for sent in c.requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, action="append", required=True, help="once per server")
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--per-connection", type=int, default=16, help="requests on each connection")
    parser.add_argument("--depth", type=int, default=8, help="requests in flight on a pipelined connection")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sent = asyncio.run(drive(args.port, args.concurrency, args.per_connection, args.depth, args.seed))
    args.out.write_text("".join(json.dumps(asdict(s)) + "\n" for s in sent), encoding="utf-8")


if __name__ == "__main__":
    main()
