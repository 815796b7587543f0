"""The feeds against the engines' own message classes and publishers: vLLM's, and SGLang's without its GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from whyspan.feeds import forward_pass, kv_events
from whyspan.feeds.forward_pass import PassFeed
from whyspan.feeds.kv_feed import KvFeed
from whyspan.feeds.messages import Feed, FeedState

from tests.bench.ports import free_port
from tests.engine.feeds_play import CANARY, Peer
from tests.unit.feeds.publisher import Heard, until

RECORDED: dict[str, str] = json.loads(
    (Path(__file__).parents[1] / "unit" / "feeds" / "recorded.json").read_text()
)
INTS = [12923928880073813515, 17]
BYTES = [
    "11223344556677889900aabbccddeeff11223344556677889900aabbccddeeff",
    "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20",
]


@pytest.fixture(scope="module")
def vllm() -> Iterator[Peer]:
    with Peer("vllm") as peer:
        yield peer


@pytest.fixture(scope="module")
def sglang() -> Iterator[Peer]:
    with Peer("sglang") as peer:
        yield peer


@pytest.fixture(params=["vllm", "sglang"])
def peer(request: pytest.FixtureRequest) -> Peer:
    found: Peer = request.getfixturevalue(request.param)
    return found


def test_recordings_are_what_the_classes_make_today(vllm: Peer, sglang: Peer) -> None:
    assert {
        "vllm 0.32.0 int": vllm.ask("encode", hashes=INTS),
        "vllm 0.32.0 bytes": vllm.ask("encode", hashes=BYTES),
        "sglang 0.5.23 int": sglang.ask("encode", hashes=[-5, 17]),
        "sglang 0.5.23 pass": sglang.ask("encode_pass", tokens=7),
        "sglang 0.5.23 idle": sglang.ask("encode_pass", idle=True),
    } == RECORDED


def test_what_is_encoded_is_decoded_without_its_tokens(peer: Peer) -> None:
    payload = bytes.fromhex(peer.ask("encode", hashes=list(range(4))))
    canary = [msgspec.msgpack.encode(t) for t in CANARY]
    assert sum(t in payload for t in canary) == 64
    d = kv_events.decode(payload, "vllm")
    assert sum(b.stored_tokens for b in d.bodies) == 64
    out = msgspec.msgpack.encode(d.bodies)
    assert not any(t in out for t in canary)
    assert not any(str(t) in repr(d) for t in CANARY)


def test_a_pass_of_sglang(sglang: Peer) -> None:
    body = forward_pass.decode(bytes.fromhex(sglang.ask("encode_pass", tokens=131)))
    assert (body.counter, body.rank, body.wall_ns, body.prefill_tokens) == (5, 1, 12_500_000, 131)
    assert forward_pass.decode(bytes.fromhex(sglang.ask("encode_pass", idle=True))).idle


async def both_published(peer: Peer, heard: Heard, state: FeedState) -> None:
    """Batches heard, 7 lost as at the high-water mark, and replayed by the engine's own thread."""

    def publish(first: int, count: int, leak: bool = False) -> Any:
        return asyncio.to_thread(peer.ask, "publish", first=2 * first, count=count, leak=leak)

    first = 0
    while not heard.marks:  # a subscription takes a moment
        await publish(first, 1)
        await asyncio.sleep(0.05)
        first += 1
    await until(lambda: heard.blocks and heard.blocks[-1] == 2 * first - 1)
    heard.marks.clear()
    await publish(first, 5)
    await publish(first + 5, 7, leak=True)
    await publish(first + 12, 1)
    await until(lambda: state.repaired == 7 and len(heard.marks) == 3 * 13)
    await publish(first + 13, 101)
    await until(lambda: len(heard.marks) == 3 * 114)
    assert heard.blocks == list(range(2 * first, 2 * first + 228))
    assert (state.gaps, state.missed, state.errors, state.restarts) == (1, 0, 0, 0)
    assert not any(str(t) in repr(heard.marks) for t in CANARY)


def test_an_engine_s_own_publisher_with_a_gap_and_its_replay(peer: Peer) -> None:
    endpoint, replay = (f"tcp://*:{free_port()}" for _ in range(2))
    peer.ask("open", endpoint=endpoint, replay=replay)
    feed = Feed(1, "kv_events", "vllm", endpoint.replace("*", "127.0.0.1"), replay.replace("*", "127.0.0.1"))

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heard, state = Heard(), FeedState(1)
        running = KvFeed(context, feed, state, heard.emit)
        running.start()
        try:
            await both_published(peer, heard, state)
        finally:
            running.close()
            context.destroy(0)

    asyncio.run(run())


def test_sglang_s_own_passes_over_ipc(sglang: Peer, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/passes.0"
    sglang.ask("open_passes", endpoint=endpoint)

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heard, state = Heard(), FeedState(1)
        running = PassFeed(context, Feed(1, "forward_pass", "sglang", endpoint), state, heard.emit)
        running.start()
        try:
            await until(lambda: state.state == "up")
            await asyncio.to_thread(sglang.ask, "publish_passes", count=0)  # idle: a heartbeat each second
            await until(lambda: heard.marks)
            assert heard.marks[0][1].idle
            await asyncio.to_thread(sglang.ask, "publish_passes", count=13)
            await until(lambda: sum(not b.idle for _, b in heard.marks) == 13)
            passes = [b for _, b in heard.marks if not b.idle]
            assert [b.prefill_tokens for b in passes] == list(range(13))
            assert all(b.wall_ns == 12_500_000 and b.gap == 0 for b in passes)
            assert (state.gaps, state.errors) == (0, 0)
        finally:
            running.close()
            context.destroy(0)

    asyncio.run(run())
