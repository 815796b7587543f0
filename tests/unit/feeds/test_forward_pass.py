"""SGLang's forward passes: as its own classes encode them, the heartbeat, and hostile bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.feeds import forward_pass
from whyspan.feeds.forward_pass import PassDecodeError
from whyspan.marks import Pass

RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "recorded.json").read_text())
encode = msgspec.msgpack.encode


def test_a_pass_of_its_own_classes() -> None:
    assert forward_pass.decode(bytes.fromhex(RECORDED["sglang 0.5.23 pass"]), 2) == Pass(
        counter=5,
        rank=1,
        wall_ns=12_500_000,
        prefill_requests=2,
        prefill_tokens=7,
        prefill_kv_tokens=64,
        decode_requests=3,
        decode_kv_tokens=900,
        queued_requests=5,
        idle=False,
        gap=2,
    )


def test_the_heartbeat_is_idle() -> None:
    assert forward_pass.decode(bytes.fromhex(RECORDED["sglang 0.5.23 idle"])) == Pass(counter=0, idle=True)


@pytest.mark.parametrize("wall", [math.nan, math.inf, -1.0, 1e300])
def test_a_length_that_is_none(wall: float) -> None:
    body = forward_pass.decode(encode({"wall_time": wall, "scheduled_requests": {"num_decode_requests": 1}}))
    assert (body.wall_ns, body.idle) == (0, False)


def test_unknown_fields_are_skipped() -> None:
    assert forward_pass.decode(encode({"counter_id": 3, "new": [1, {"a": 1}], "version": 2})).counter == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80" * 70_000,
        encode([1]),
        encode({"counter_id": -1}),
        encode({"scheduled_requests": {"sum_prefill_tokens": 1 << 50}}),
    ],
)
def test_what_is_no_pass(payload: bytes) -> None:
    with pytest.raises(PassDecodeError):
        forward_pass.decode(payload)


FIELDS = st.sampled_from(["counter_id", "wall_time", "scheduled_requests", "num_decode_requests", "dp_rank"])
VALUES = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.dictionaries(FIELDS, inner),
    max_leaves=8,
)


@given(st.binary(max_size=200) | VALUES.map(encode))
@settings(max_examples=200)
def test_any_bytes(payload: Any) -> None:
    try:
        body = forward_pass.decode(payload)
    except PassDecodeError:
        return
    msgspec.msgpack.decode(encode(body), type=Pass)
