"""What goes between the collector and the feeds process: one msgpack message in each packet of a Unix socket."""

from __future__ import annotations

import math
import struct
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from whyspan.marks import Gauges, Health, KvBlocks, Pass
from whyspan.text import clean

KV_EVENTS, FORWARD_PASS, METRICS, HEALTH = "kv_events", "forward_pass", "metrics", "health"
FeedBody = KvBlocks | Pass | Gauges | Health
#: What a feed of each kind may say.
KINDS: Final[dict[str, type[FeedBody]]] = {
    KV_EVENTS: KvBlocks,
    FORWARD_PASS: Pass,
    METRICS: Gauges,
    HEALTH: Health,
}
ENGINES: Final = frozenset({"vllm", "sglang", "llama.cpp"})
#: The names that ``Gauges`` may have.
GAUGES: Final = frozenset(
    {
        *("running", "waiting", "waiting_capacity", "waiting_deferred", "kv_usage", "preemptions"),
        *("prefix_queries", "prefix_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
        *("evicted_tokens", "drafted", "accepted"),
    }
)

#: Of one packet. The default send buffer of a socket (net.core.wmem_default, 212,992 bytes) holds two.
MAX_PACKET: Final = 96 << 10
MAX_FEEDS: Final = 64
MAX_ENTRIES: Final = 1024
_LENGTH = struct.Struct(">I")

_Text = Annotated[str, Meta(max_length=512)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0.01, le=3600)]


class FeedsMessageError(ValueError):
    """A packet that is none of ours."""


class Feed(msgspec.Struct, frozen=True, omit_defaults=True):
    """One endpoint to listen to. ``id`` is never used again, so a late mark of an old feed finds no process."""

    id: _Count
    kind: _Text
    engine: _Text
    endpoint: _Text
    replay: _Text = ""
    topic: _Text = ""
    rank: _Count = 0


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Collector to feeds process: all feeds that there are to be from now on."""

    interval_s: _Seconds  # between two looks at /metrics and health
    timeout_s: _Seconds
    feeds: Annotated[list[Feed], Meta(max_length=MAX_FEEDS)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One mark: of which feed, when (CLOCK_MONOTONIC), and what."""

    feed: _Count
    ts_ns: _Count
    body: FeedBody


class Marks(msgspec.Struct, frozen=True, tag="marks"):
    """Feeds process to collector. ``entries`` are checked one by one; ``lost`` marks since the message before."""

    entries: Annotated[list[msgspec.Raw], Meta(max_length=MAX_ENTRIES)]
    lost: _Count = 0


class FeedState(msgspec.Struct, omit_defaults=True):
    """How a feed is.

    ``state``: connecting, up, down, slow (no answer in time), stopped, ended; absent when the engine does not offer it.
    ``events`` as the engine counts them, ``marks`` made of them. ``missed`` batches in ``gaps``; ``repaired`` ones came
    by replay and are not missed.
    """

    id: _Count
    state: _Text = "connecting"
    marks: _Count = 0
    events: _Count = 0
    gaps: _Count = 0
    missed: _Count = 0
    repaired: _Count = 0
    restarts: _Count = 0  # of the engine, as its sequence numbers tell
    errors: _Count = 0
    last_error: _Text = ""

    def failed(self, reason: str) -> None:
        """Count an error; the newest is kept."""
        self.errors += 1
        self.last_error = clean(reason, 200)


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Feeds process to collector, every few seconds: that it lives, what it costs, how its feeds are."""

    feeds: Annotated[list[FeedState], Meta(max_length=MAX_FEEDS)]
    cpu_s: Annotated[float, Meta(ge=0)]
    rss_bytes: _Count


_encoder = msgspec.msgpack.Encoder()
_to_collector: msgspec.msgpack.Decoder[Marks | Report] = msgspec.msgpack.Decoder(Marks | Report)
_setup = msgspec.msgpack.Decoder(Setup)
_entry = msgspec.msgpack.Decoder(Entry)


def encode(message: Setup | Marks | Report | Entry) -> bytes:
    """Return *message* as msgpack."""
    return _encoder.encode(message)


def frame(message: Setup | Marks | Report) -> bytes:
    """Return *message* as a packet: its length (u32, big endian) and msgpack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def _body(packet: bytes) -> bytes:
    # A packet is whole or cut off by too small a buffer, never two: the length tells these apart.
    if len(packet) < _LENGTH.size or _LENGTH.unpack_from(packet)[0] != len(packet) - _LENGTH.size:
        raise FeedsMessageError("a packet without its length")
    return packet[_LENGTH.size :]


def decode_setup(packet: bytes) -> Setup:
    """Return what the collector wants.

    Raises:
        FeedsMessageError: it is no `Setup`.
    """
    try:
        return _setup.decode(_body(packet))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise FeedsMessageError("not a setup") from e


def decode_to_collector(packet: bytes) -> Marks | Report:
    """Return what the feeds process said.

    Raises:
        FeedsMessageError: it is neither `Marks` nor `Report`.
    """
    try:
        return _to_collector.decode(_body(packet))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise FeedsMessageError("neither marks nor a report") from e


def decode_entry(raw: msgspec.Raw) -> Entry:
    """Return a mark whose body holds only what it may: known names, finite numbers, clean strings.

    Raises:
        FeedsMessageError: it does not pass.
    """
    try:
        entry = _entry.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise FeedsMessageError("not a mark") from e
    body = entry.body
    if isinstance(body, (KvBlocks, Gauges)) and body.engine not in ENGINES:
        raise FeedsMessageError("an engine that is not known")
    if isinstance(body, Gauges) and not all(
        name in GAUGES and math.isfinite(value) for name, value in body.values.items()
    ):
        raise FeedsMessageError("a gauge that is not known, or no number")
    if isinstance(body, KvBlocks) and body.medium != clean(body.medium, 32):
        return msgspec.structs.replace(
            entry, body=msgspec.structs.replace(body, medium=clean(body.medium, 32))
        )
    return entry
