"""The decoder of KV events: every wire shape, nothing of a prompt, and nothing but its own error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.feeds import kv_events
from whyspan.feeds.kv_events import KvDecodeError
from whyspan.marks import KvBlocks

#: Made by the engines' own classes (tests/engine/feeds_peer.py): two blocks stored, the first removed, all cleared.
RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "recorded.json").read_text())
#: The token ids in them.
CANARY = [777_000_000 + 7 * n for n in range(32)]
BIG = 12923928880073813515
encode = msgspec.msgpack.encode


def stored(hashes: list[Any], **more: Any) -> dict[str, Any]:
    base = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": CANARY}
    return base | {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None} | more


def removed(hashes: list[Any], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


def batch(*events: Any, ts: Any = 1000.5, rank: Any = 0) -> bytes:
    return encode([ts, list(events), rank])


def replay(bodies: list[KvBlocks]) -> set[int]:
    """Return the blocks that are there after all bodies, as their docstring says to read them."""
    there: set[int] = set()
    for b in bodies:
        if b.cleared:
            there.clear()
        there -= set(b.removed_hashes)
        there |= set(b.hashes)
    return there


@pytest.mark.parametrize(
    ("name", "hashes"),
    [
        ("vllm 0.32.0 int", [BIG, 17]),
        ("vllm 0.32.0 bytes", [0x11223344556677889900AABBCCDDEEFF & (1 << 64) - 1, 0x191A1B1C1D1E1F20]),
        ("sglang 0.5.23 int", [(1 << 64) - 5, 17]),
    ],
)
def test_what_the_engines_own_classes_encode(name: str, hashes: list[int]) -> None:
    d = kv_events.decode(bytes.fromhex(RECORDED[name]), "vllm", 0)
    assert (d.unix_s, d.events, d.unknown) == (1000.5, 3, 0)
    first, second, third = d.bodies
    assert (first.stored, first.stored_tokens, first.block_size, first.medium) == (2, 32, 16, "GPU")
    assert first.hashes == hashes
    assert (second.removed, second.removed_hashes) == (1, hashes[:1])
    assert third.cleared == 1


# By hand: the form that vLLM 0.16 is documented to have.
ARRAYS: list[list[Any]] = [
    ["BlockStored", [BIG, 2], None, CANARY, 16, None, "GPU"],
    ["BlockRemoved", [3], "CPU"],
    ["AllBlocksCleared"],
]
MAPS = [stored([BIG, 2]), removed([3], medium="CPU"), {"type": "AllBlocksCleared"}]


@pytest.mark.parametrize(
    "payload",
    [
        encode([1000.5, ARRAYS, 5]),
        encode([1000.5, MAPS, 5]),
        encode({"ts": 1000.5, "events": MAPS, "data_parallel_rank": 5}),
        encode({"events": ARRAYS, "attn_dp_rank": 5, "new": {"a": [1]}, "ts": 1000.5}),
        encode([1000.5, [ARRAYS[0], MAPS[1], ARRAYS[2]], 5, "a field of tomorrow", {"x": 1}]),
    ],
)
def test_all_shapes_say_the_same(payload: bytes) -> None:
    d = kv_events.decode(payload, "vllm")
    gpu, cpu, cleared = d.bodies
    assert (gpu.rank, gpu.medium, gpu.hashes, gpu.stored_tokens) == (5, "GPU", [BIG, 2], 32)
    assert (cpu.rank, cpu.medium, cpu.removed_hashes, cpu.stored) == (5, "CPU", [3], 0)
    assert (cleared.rank, cleared.cleared) == (5, 1)


@pytest.mark.parametrize("event", [ARRAYS[0][:5], ARRAYS[0] + ["a", [["m", 1]], 7, "later"]])
def test_a_positional_event_may_be_shorter_and_longer(event: list[Any]) -> None:
    (body,) = kv_events.decode(batch(event), "vllm").bodies
    assert (body.hashes, body.block_size, body.group) == ([BIG, 2], 16, 7 if len(event) > 7 else 0)


def test_unknown_fields_are_skipped_and_unknown_kinds_counted() -> None:
    odd = {"type": "BlockMoved", "block_hashes": "of another type", "token_ids": CANARY}
    payload = batch(
        stored([1], lookahead_token_ids=[CANARY], session_id="s", x={"y": [1]}), odd, ["Moved", 5]
    )
    d = kv_events.decode(payload, "sglang", 3)
    assert (d.events, d.unknown, len(d.bodies)) == (3, 2, 1)
    assert d.bodies[0].engine == "sglang"


def test_rank_of_the_feed_when_the_batch_has_none() -> None:
    for rank in (None, -1, 1 << 40):
        assert kv_events.decode(batch(stored([1]), rank=rank), "vllm", 3).bodies[0].rank == 3


@pytest.mark.parametrize(
    "payload", [*map(bytes.fromhex, list(RECORDED.values())[:3]), batch(*MAPS), batch(*ARRAYS)]
)
def test_no_token_leaves_the_decoder(payload: bytes) -> None:
    assert sum(encode(t) in payload for t in CANARY) == 32  # they are in there
    d = kv_events.decode(payload, "vllm")
    out = msgspec.msgpack.encode(d.bodies)
    assert not any(encode(t) in out for t in CANARY)
    assert not any(str(t) in repr(d) for t in CANARY)
    with pytest.raises(KvDecodeError) as caught:
        kv_events.decode(payload[:-1], "vllm")
    assert not any(str(t) in str(caught.value) for t in CANARY)
    assert caught.value.__cause__ is None


def test_media_and_groups_are_told_apart() -> None:
    d = kv_events.decode(
        batch(stored([1, 2], group_idx=0), stored([3], group_idx=1), stored([4], medium="CPU"), removed([9])),
        "vllm",
    )
    assert {(b.medium, b.group, b.stored, b.removed) for b in d.bodies} == {
        ("GPU", 0, 2, 1),
        ("GPU", 1, 1, 0),
        ("CPU", 0, 1, 0),
    }


EVENTS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5), max_size=4)) | st.none(), max_size=12)


@given(EVENTS)
def test_order_survives(events: list[tuple[bool, list[int]] | None]) -> None:
    there: set[int] = set()
    wire: list[Any] = []
    for e in events:
        if e is None:
            there.clear()
            wire.append({"type": "AllBlocksCleared"})
        elif e[0]:
            there |= set(e[1])
            wire.append(stored(e[1]))
        else:
            there -= set(e[1])
            wire.append(removed(e[1]))
    d = kv_events.decode(batch(*wire), "vllm")
    assert replay(d.bodies) == there
    assert sum(b.stored for b in d.bodies) == sum(len(e[1]) for e in events if e and e[0])
    assert sum(b.removed for b in d.bodies) == sum(len(e[1]) for e in events if e and not e[0])
    assert sum(b.cleared for b in d.bodies) == events.count(None)


def test_many_blocks_are_several_bodies() -> None:
    d = kv_events.decode(batch(removed(list(range(1000, 1601))), stored(list(range(1009)))), "vllm")
    assert replay(d.bodies) == set(range(1009))
    assert all(len(b.hashes) <= 256 and len(b.removed_hashes) <= 256 for b in d.bodies)
    assert sum(b.stored_tokens for b in d.bodies) == 1009 * 16
    # As the collector will take them.
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(d.bodies), type=list[KvBlocks])
    assert again == d.bodies


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        b"\xc1",
        b"x" * (kv_events.MAX_PAYLOAD + 1),
        encode([1.0, "events", 0]),
        encode([1.0]),
        encode({"ts": 1.0}),
        batch({"no": "type"}),
        batch([]),
        batch(5),
        batch(stored(["text"])),
        batch(stored([b"x" * 65])),
        batch(stored([1], block_size=-1)),
        batch(stored([1], block_size=1 << 30)),
        batch(stored([1], medium="x" * 65)),
        batch({"type": "BlockStored"}),
        batch(["BlockStored", [1], None, [1], "size"]),
        # Announces four billion elements, and has none.
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 100_000,
        batch(*[{"type": "AllBlocksCleared"}] * 16_385),
        batch(*[stored(list(range(60_000)))] * 5),
    ],
)
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(KvDecodeError):
        kv_events.decode(payload, "vllm")


@pytest.mark.parametrize("ts", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none(ts: float) -> None:
    assert kv_events.decode(batch(stored([1]), ts=ts), "vllm").unix_s == 0


def test_a_hostile_medium_is_shown_harmless() -> None:
    (body,) = kv_events.decode(batch(stored([1], medium="G\x1b[31m")), "vllm").bodies
    assert "\x1b" not in body.medium


def only_its_own_error(payload: bytes) -> None:
    try:
        d = kv_events.decode(payload, "vllm")
    except KvDecodeError:
        return
    msgspec.msgpack.decode(msgspec.msgpack.encode(d.bodies), type=list[KvBlocks])


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes(payload: bytes) -> None:
    only_its_own_error(payload)


MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "ts"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(
                ["type", "ts", "events", "block_hashes", "block_size", "medium", "group_idx", "x"]
            ),
            inner,
        )
    ),
    max_leaves=20,
)


@given(MSGPACK)
@settings(max_examples=200)
def test_any_msgpack(data: Any) -> None:
    only_its_own_error(encode(data))


@given(st.integers(0, 700), st.integers(0, 255), st.sampled_from(sorted(RECORDED)))
@settings(max_examples=200)
def test_a_damaged_recording(at: int, byte: int, name: str) -> None:
    payload = bytearray.fromhex(RECORDED[name])
    payload[at % len(payload)] = byte
    only_its_own_error(bytes(payload))


END = (-1).to_bytes(8, "big", signed=True)


def test_replay_with_and_without_the_topic() -> None:
    for topic in ([], [b""], [b"topic"]):
        assert kv_events.replay_reply([b"", *topic, (5).to_bytes(8, "big"), b"payload"]) == (5, b"payload")
        assert kv_events.replay_reply([b"", *topic, END, b""]).seq == kv_events.END


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", END],
        [b"x", END, b""],
        [b"", b"short", b""],
        [b""] * 5,
        [b"", (-2).to_bytes(8, "big", signed=True), b""],
    ],
)
def test_what_is_no_reply(frames: list[bytes]) -> None:
    with pytest.raises(KvDecodeError):
        kv_events.replay_reply(frames)


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_any_reply(frames: list[bytes]) -> None:
    try:
        kv_events.replay_reply(frames)
    except KvDecodeError:
        pass
