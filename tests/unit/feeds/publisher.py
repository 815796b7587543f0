"""A publisher of KV events as engines have it, PUB and ROUTER, with faults on demand; and a loop that runs a feed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from whyspan.feeds.messages import Feed, FeedBody, FeedState

END = (-1).to_bytes(8, "big", signed=True)


def payload(n: int) -> bytes:
    """Return a batch that stores block *n*."""
    event = {
        "type": "BlockStored",
        "block_hashes": [n],
        "token_ids": [1, 2],
        "block_size": 16,
        "medium": "GPU",
    }
    return msgspec.msgpack.encode([time.time(), [event], 0])


class Publisher:
    """Sends a batch per call; what is lost is kept for replay all the same."""

    def __init__(self, *, topic_in_replay: bool = True, silent: bool = False) -> None:
        """*silent*: replay requests get no answer."""
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for s in (self._pub, self._router):
            s.setsockopt(zmq.LINGER, 0)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._topic_in_replay, self._silent = topic_in_replay, silent
        self._buffer: list[tuple[int, bytes]] = []
        self.seq = 0
        self.asked: list[int] = []

    @property
    def feed(self) -> Feed:
        """What to listen to."""
        return Feed(
            1, "kv_events", "vllm", f"tcp://127.0.0.1:{self.port}", f"tcp://127.0.0.1:{self.replay_port}"
        )

    def publish(self, *, lost: bool = False, kept: bool = True, body: bytes | None = None) -> None:
        """Send the next batch, or lose it; its block has its number."""
        data = payload(self.seq) if body is None else body
        if not lost:
            self._pub.send_multipart([b"", self.seq.to_bytes(8, "big"), data])
        if kept:
            self._buffer.append((self.seq, data))
        self.seq += 1

    def raw(self, frames: list[bytes]) -> None:
        """Send anything."""
        self._pub.send_multipart(frames)

    def restart(self) -> None:
        """Begin anew on the same port, as an engine that its front end started again."""
        self.seq, self._buffer = 0, []

    def serve(self) -> None:
        """Answer the replay requests that are waiting."""
        while self._router.poll(0):
            client, _, start = self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            if self._silent:
                continue
            topic = [b""] if self._topic_in_replay else []
            for seq, data in self._buffer:
                if seq >= first:
                    self._router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), data])
            self._router.send_multipart([client, b"", *topic, END, b""])

    def close(self) -> None:
        """End it."""
        self._context.destroy(0)


class Heard:
    """What a feed said."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, Any]] = []

    def emit(self, feed: Feed, ts_ns: int, body: FeedBody) -> None:
        """Keep it."""
        self.marks.append((ts_ns, body))

    @property
    def blocks(self) -> list[int]:
        """The blocks stored, in order."""
        return [h for _, b in self.marks for h in b.hashes]


async def until(
    condition: Callable[[], Any], each: Callable[[], None] = lambda: None, timeout_s: float = 20.0
) -> None:
    """Wait until *condition* holds, calling *each* meanwhile."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            each()
            await asyncio.sleep(0.005)


async def connected(publisher: Publisher, state: FeedState) -> None:
    """Wait until messages get through; a subscription takes a moment after the connection."""
    await until(lambda: state.state == "up")
    await until(lambda: state.errors or state.marks, lambda: publisher.raw([b"too", b"short"]))
    errors = -1
    while errors != state.errors:  # all of them have arrived
        errors = state.errors
        await asyncio.sleep(0.1)
    state.errors, state.last_error = 0, ""
