"""Framing and messages between the two processes."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.model import Finding
from whyspan_exporters import link
from whyspan_exporters.link import (
    Ack,
    Count,
    CountMsg,
    FindingFrame,
    FindingMsg,
    Frames,
    Hello,
    LinkError,
    StatusMsg,
)

MakeFinding = Callable[..., Finding]


def test_messages_survive_the_trip(make_finding: MakeFinding) -> None:
    messages: list[link.ToExporter] = [
        Hello(link.PROTOCOL, "abc"),
        FindingMsg(1, make_finding(3)),
        CountMsg(2, [Count("requests", "chat", "200", 7)]),
        StatusMsg(3, {"probes": [{"name": "sched", "state": "ok"}]}),
    ]
    stream = b"".join(link.encode(m) for m in messages)
    assert [link.decode_to_exporter(b) for b in Frames().feed(stream)] == messages
    (body,) = Frames().feed(link.encode(Ack(3, "store: disk full")))
    assert link.decode_to_collector(body) == Ack(3, "store: disk full")


def test_encoded_finding_reads_as_finding(make_finding: MakeFinding) -> None:
    finding = make_finding(5)
    frame = link.encode(FindingFrame(9, msgspec.Raw(msgspec.msgpack.encode(finding))))
    assert frame == link.encode(FindingMsg(9, finding))


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_any_cutting_of_the_stream_gives_the_same_frames(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack(">I", len(b)) + b for b in bodies)
    frames, got, rest = Frames(), [], stream
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        got += list(frames.feed(rest[:n]))
        rest = rest[n:]
    assert got == bodies


def test_oversize_frames_are_refused_on_both_sides() -> None:
    with pytest.raises(LinkError, match="over the limit"):
        list(Frames().feed(struct.pack(">I", link.MAX_FRAME_BYTES + 1)))
    with pytest.raises(LinkError, match="over the limit"):
        link.encode(StatusMsg(1, {"x": "y" * link.MAX_FRAME_BYTES}))


def test_frames_before_garbage_are_delivered() -> None:
    good = link.encode(Hello(link.PROTOCOL, "a"))
    feed = Frames().feed(good + b"\xff" * 8)
    assert link.decode_to_exporter(next(feed)) == Hello(link.PROTOCOL, "a")
    with pytest.raises(LinkError):
        next(feed)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"GET / HTTP/1.1", msgspec.msgpack.encode({"type": "nope"})])
def test_garbage_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(LinkError):
        link.decode_to_exporter(body)
    with pytest.raises(LinkError):
        link.decode_to_collector(body)
