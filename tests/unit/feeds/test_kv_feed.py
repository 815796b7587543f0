"""Listening to KV events over real ZeroMQ sockets: gaps, replay in both forms, restarts, ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
from whyspan.feeds import kv_feed
from whyspan.feeds.forward_pass import PassFeed
from whyspan.feeds.kv_feed import KvFeed
from whyspan.feeds.messages import Feed, FeedState

from tests.unit.feeds.publisher import Heard, Publisher, connected, until

Scenario = Callable[[Publisher, KvFeed, Heard], Awaitable[None]]


@asynccontextmanager
async def listening(feed: Feed, kind: Any = KvFeed) -> AsyncIterator[tuple[Any, Heard]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard = Heard()
    running = kind(context, feed, FeedState(1), heard.emit)
    running.start()
    try:
        yield running, heard
    finally:
        running.close()
        context.destroy(0)


def play(scenario: Scenario, replay: bool = True, **publisher: Any) -> None:
    async def run() -> None:
        p = Publisher(**publisher)
        feed = p.feed if replay else msgspec.structs.replace(p.feed, replay="")
        try:
            async with listening(feed) as (running, heard):
                await connected(p, running.state)
                await scenario(p, running, heard)
        finally:
            p.close()

    asyncio.run(run())


def test_batches_in_order_with_the_engine_s_own_time() -> None:
    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        before = time.monotonic_ns()
        for _ in range(503):
            p.publish()
        await until(lambda: len(heard.marks) == 503)
        assert heard.blocks == list(range(503))
        times = [ts for ts, _ in heard.marks]
        assert times == sorted(times)
        # The wall clock that made the time has microseconds.
        assert before - 10_000_000 <= times[0] and times[-1] <= time.monotonic_ns()
        assert (feed.state.events, feed.state.gaps, feed.state.missed, feed.state.errors) == (503, 0, 0, 0)

    play(scenario)


@pytest.mark.parametrize("topic_in_replay", [True, False])
def test_a_gap_is_repaired(topic_in_replay: bool) -> None:
    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        p.publish()
        for _ in range(7):
            p.publish(lost=True)
        p.publish()
        await until(lambda: p.asked, p.serve)
        for _ in range(3):
            p.publish()
        await until(lambda: len(heard.marks) == 12, p.serve)
        assert p.asked == [1]
        assert heard.blocks == list(range(12))  # in order, each once
        assert all(b.gap == 0 for _, b in heard.marks)
        assert [b.replayed for _, b in heard.marks[:9]] == [False] + [True] * 8
        assert (feed.state.gaps, feed.state.repaired, feed.state.missed) == (1, 7, 0)

    play(scenario, topic_in_replay=topic_in_replay)


def test_without_a_replay_endpoint_the_gap_is_told() -> None:
    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        p.publish()
        for _ in range(7):
            p.publish(lost=True)
        p.publish()
        await until(lambda: len(heard.marks) == 2)
        assert [b.gap for _, b in heard.marks] == [0, 7]
        assert (feed.state.gaps, feed.state.repaired, feed.state.missed) == (1, 0, 7)

    play(scenario, replay=False)


def test_what_the_engine_has_forgotten_stays_missed() -> None:
    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        p.publish()
        for n in range(7):
            p.publish(lost=True, kept=n >= 3)
        p.publish()
        await until(lambda: len(heard.marks) == 6, p.serve)
        assert heard.blocks == [0, 4, 5, 6, 7, 8]
        assert [b.gap for _, b in heard.marks] == [0, 3, 0, 0, 0, 0]
        assert (feed.state.gaps, feed.state.repaired, feed.state.missed) == (1, 4, 3)

    play(scenario)


def test_a_replay_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "_REPLAY_S", 0.3)

    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        p.publish()
        p.publish(lost=True)
        p.publish()
        await until(lambda: p.asked, p.serve)
        p.publish()
        await until(lambda: len(heard.marks) == 3)
        assert [b.gap for _, b in heard.marks] == [0, 1, 0]
        assert "replay" in feed.state.last_error
        # Not asked again at once: the next gap is told.
        p.publish(lost=True)
        p.publish()
        await until(lambda: len(heard.marks) == 4, p.serve)
        assert heard.marks[-1][1].gap == 1
        assert len(p.asked) == 1

    play(scenario, silent=True)


def test_too_much_held_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "_MAX_HELD", 10)

    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        p.publish()
        p.publish(lost=True)
        for _ in range(12):
            p.publish()
        await until(lambda: len(heard.marks) == 13)
        assert sum(b.gap for _, b in heard.marks) == 1

    play(scenario, silent=True)


def test_an_engine_that_began_anew() -> None:
    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        for _ in range(5):
            p.publish()
        await until(lambda: len(heard.marks) == 5)
        p.restart()
        p.publish()
        await until(lambda: len(heard.marks) == 6)
        assert (feed.state.restarts, feed.state.gaps) == (1, 0)
        # Again, and its first batches are missed: they are asked for.
        p.publish()
        await until(lambda: len(heard.marks) == 7)
        p.restart()
        p.publish(lost=True)
        p.publish()
        await until(lambda: len(heard.marks) == 9, p.serve)
        assert p.asked == [0]
        assert heard.blocks == [0, 1, 2, 3, 4, 0, 1, 0, 1]
        assert (feed.state.restarts, feed.state.gaps, feed.state.repaired, feed.state.missed) == (2, 1, 1, 0)

    play(scenario)


def test_garbage_is_counted_and_nothing_stops() -> None:
    async def scenario(p: Publisher, feed: KvFeed, heard: Heard) -> None:
        p.publish(body=b"\xc1garbage")
        p.raw([b"", b"12345678", b""][:1])
        p.raw([b"", b"\xff" * 8, b"x"])
        p.publish()
        await until(lambda: len(heard.marks) == 1)
        assert heard.blocks == [1]
        assert (feed.state.errors, feed.state.missed) == (3, 0)

    play(scenario)


def test_an_end_and_a_new_beginning_are_seen() -> None:
    async def run() -> None:
        p = Publisher()
        async with listening(p.feed) as (feed, _):
            await connected(p, feed.state)
            p.close()
            await until(lambda: feed.state.state == "down")
            assert feed.state.last_error
            again: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            pub = again.socket(zmq.PUB)
            pub.bind(f"tcp://127.0.0.1:{p.port}")
            await until(lambda: feed.state.state == "up")
            again.destroy(0)

    asyncio.run(run())


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "tcp://", "tcp://h", "tcp://*:x", "udp://h:1", "http://h:1"]
)
def test_a_wrong_address_is_a_state(endpoint: str) -> None:
    async def run() -> None:
        async with listening(Feed(1, "kv_events", "vllm", endpoint)) as (feed, _):
            assert feed.state.state == "stopped"
            assert feed.state.errors == 1

    asyncio.run(run())


def test_forward_passes() -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pub = context.socket(zmq.PUB)
        port = pub.bind_to_random_port("tcp://127.0.0.1")

        def send(seq: int, **fields: Any) -> None:
            pub.send_multipart(
                [b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode({"counter_id": seq} | fields)]
            )

        async with listening(Feed(1, "forward_pass", "sglang", f"tcp://127.0.0.1:{port}"), PassFeed) as (
            feed,
            heard,
        ):
            await until(lambda: heard.marks, lambda: send(5))
            await asyncio.sleep(0.2)
            heard.marks.clear()
            send(6, wall_time=0.25, scheduled_requests={"num_decode_requests": 3})
            send(9)
            send(0)
            pub.send_multipart([b"", (1).to_bytes(8, "big"), b"garbage"])
            await until(lambda: len(heard.marks) == 3 and feed.state.last_error)
            first, second, third = (b for _, b in heard.marks)
            assert (first.wall_ns, first.decode_requests, first.idle, first.gap) == (250_000_000, 3, False, 0)
            assert (second.idle, second.gap) == (True, 2)
            assert (third.counter, third.gap, feed.state.restarts >= 1) == (0, 0, True)
        context.destroy(0)

    asyncio.run(run())
