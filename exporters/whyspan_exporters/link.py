"""Messages between the collector and the exporter, and their framing on a Unix stream socket.

A frame is a length (u32, big endian) and that many bytes of msgpack. The collector speaks first with `Hello`;
the exporter only ever sends `Ack`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from whyspan.errors import WhyspanError
from whyspan.model import Finding

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


class LinkError(WhyspanError):
    """The other side of the socket does not speak this protocol, or a message is too big for it."""


class Hello(msgspec.Struct, tag="hello"):
    """Opens a connection. ``instance`` names one run of a collector."""

    protocol: int
    instance: str


class FindingMsg(msgspec.Struct, tag="finding"):
    """One finding. ``seq`` rises with every message of a connection."""

    seq: int
    finding: Finding


class FindingFrame(msgspec.Struct, tag="finding"):
    """A `FindingMsg` on its way out, its finding already encoded."""

    seq: int
    finding: msgspec.Raw


class Count(msgspec.Struct, frozen=True, array_like=True):
    """A total since the collector started: ``requests`` by service and status, ``lost`` by event, ..."""

    name: str
    service: str
    label: str
    value: int


class CountMsg(msgspec.Struct, tag="counts"):
    """All counts. Totals, not differences: sending them again changes nothing."""

    seq: int
    counts: list[Count]


class StatusMsg(msgspec.Struct, tag="status"):
    """The state of the collector and its probes, JSON-like; the newest one counts."""

    seq: int
    status: dict[str, Any]


class Ack(msgspec.Struct, tag="ack"):
    """Every message up to ``seq`` is durable. ``state`` says why newer ones are not; else it is empty."""

    seq: int
    state: str = ""


ToExporter = Hello | FindingMsg | CountMsg | StatusMsg
Message = ToExporter | FindingFrame | Ack

_encoder = msgspec.msgpack.Encoder()
_to_exporter: msgspec.msgpack.Decoder[ToExporter] = msgspec.msgpack.Decoder(ToExporter)
_to_collector: msgspec.msgpack.Decoder[Ack] = msgspec.msgpack.Decoder(Ack)


def encode(message: Message) -> bytes:
    """Return *message* as a frame.

    Raises:
        LinkError: It is larger than `MAX_FRAME_BYTES`; the caller drops it and counts it.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise LinkError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_to_exporter(body: bytes) -> ToExporter:
    """Return the message in a frame's body.

    Raises:
        LinkError: It is none that a collector sends.
    """
    try:
        return _to_exporter.decode(body)
    except msgspec.MsgspecError as exc:
        raise LinkError(f"not a message: {exc}") from exc


def decode_to_collector(body: bytes) -> Ack:
    """Return the `Ack` in a frame's body.

    Raises:
        LinkError: It is not one.
    """
    try:
        return _to_collector.decode(body)
    except msgspec.MsgspecError as exc:
        raise LinkError(f"not an acknowledgement: {exc}") from exc


class Frames:
    """Cuts a byte stream into frames; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the body of every frame that *data* completes, in order.

        Raises:
            LinkError: A frame announces more than `MAX_FRAME_BYTES`: the stream is garbage from here on.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._buffer, start)
                if size > MAX_FRAME_BYTES:
                    raise LinkError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + size
                if len(self._buffer) < end:
                    return
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]
