"""What the collector takes from the feeds process: whole packets, known things, bounded numbers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import config
from whyspan.feeds import messages
from whyspan.feeds.messages import Entry, Feed, FeedsMessageError, FeedState, Marks, Report, Setup
from whyspan.marks import Gauges, Health, KvBlocks, Pass

BODIES: list[messages.FeedBody] = [
    KvBlocks(engine="vllm", stored=1, hashes=[(1 << 64) - 1]),
    Pass(counter=3, idle=True),
    Gauges(engine="llama.cpp", values={"running": 2.0}),
    Health(status=200, took_ns=5),
]


def test_there_and_back() -> None:
    setup = Setup(5.0, 2.0, [Feed(1, "kv_events", "vllm", "tcp://127.0.0.1:1", "r", "t", 3)])
    assert messages.decode_setup(messages.frame(setup)) == setup
    report = Report([FeedState(1, "up", 5)], 0.5, 1000)
    assert messages.decode_to_collector(messages.frame(report)) == report
    raws = [msgspec.Raw(messages.encode(Entry(1, 5, body))) for body in BODIES]
    marks = messages.decode_to_collector(messages.frame(Marks(raws, 7)))
    assert isinstance(marks, Marks)
    assert [messages.decode_entry(r).body for r in marks.entries] == BODIES
    assert marks.lost == 7


def test_the_configuration_knows_the_same_kinds_and_engines() -> None:
    assert tuple(messages.KINDS) == config.FEED_KINDS
    assert set(config.FEED_ENGINES) == messages.ENGINES


@pytest.mark.parametrize(
    "body",
    [
        Gauges(engine="vllm", values={"evil": 1.0}),
        Gauges(engine="vllm", values={"running": math.nan}),
        Gauges(engine="\x1b[31m", values={}),
        KvBlocks(engine="another"),
        KvBlocks(engine="vllm", stored=-1),
        KvBlocks(engine="vllm", hashes=[1] * 257),
        Health(status=1 << 50),
    ],
)
def test_what_may_not_be_said(body: Any) -> None:
    with pytest.raises(FeedsMessageError):
        messages.decode_entry(msgspec.Raw(messages.encode(Entry(1, 5, body))))


def test_a_medium_is_made_harmless() -> None:
    entry = messages.decode_entry(
        msgspec.Raw(messages.encode(Entry(1, 5, KvBlocks(engine="vllm", medium="\x1b[2J"))))
    )
    assert isinstance(entry.body, KvBlocks)
    assert entry.body.medium == "\\x1b[2J"


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=150)
def test_any_bytes(data: bytes, framed: bool) -> None:
    packet = len(data).to_bytes(4, "big") + data if framed else data
    for decode in (messages.decode_setup, messages.decode_to_collector):
        try:
            decode(packet)
        except FeedsMessageError:
            pass
    if data:
        try:
            messages.decode_entry(msgspec.Raw(data))
        except FeedsMessageError:
            pass
