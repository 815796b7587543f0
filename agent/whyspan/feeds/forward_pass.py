"""SGLang's forward-pass metrics: one message per pass of the scheduler, and a heartbeat each second while it idles."""

from __future__ import annotations

import time
from typing import Annotated, Final

import msgspec
import zmq
from msgspec import Meta

from whyspan.feeds.kv_feed import Emit
from whyspan.feeds.messages import Feed, FeedState
from whyspan.feeds.sequence import Sequence, number
from whyspan.feeds.subscriber import Channel, EndpointError, Frames
from whyspan.marks import Pass

MAX_PAYLOAD: Final = 64 << 10
_MAX_WALL_S: Final = 3600.0
_MAX_GAP: Final = 1 << 40

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class PassDecodeError(ValueError):
    """A payload that is no forward pass; the message never quotes it."""


class _Scheduled(msgspec.Struct):
    num_prefill_requests: _Count = 0
    sum_prefill_tokens: _Count = 0
    sum_prefill_kv_tokens: _Count = 0
    num_decode_requests: _Count = 0
    sum_decode_kv_tokens: _Count = 0


class _Waiting(msgspec.Struct):
    num_prefill_requests: _Count = 0
    num_decode_requests: _Count = 0


class _Metrics(msgspec.Struct):
    """``ForwardPassMetrics`` of sglang/srt/observability/forward_pass_metrics.py, by name."""

    dp_rank: _Count = 0
    counter_id: _Count = 0
    wall_time: float = 0.0
    scheduled_requests: _Scheduled = msgspec.field(default_factory=_Scheduled)
    queued_requests: _Waiting = msgspec.field(default_factory=_Waiting)


_decoder = msgspec.msgpack.Decoder(_Metrics)
_NOTHING: Final = _Scheduled()


def decode(payload: bytes, gap: int = 0) -> Pass:
    """Return what a message says.

    Args:
        payload: msgpack, the last frame.
        gap: Messages missed before it.

    Raises:
        PassDecodeError: it is no forward pass.
    """
    if len(payload) > MAX_PAYLOAD:
        raise PassDecodeError(f"a forward pass of {len(payload)} bytes")
    try:
        m = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as e:
        raise PassDecodeError(f"not a forward pass: {type(e).__name__}") from None
    s, q = m.scheduled_requests, m.queued_requests
    wall_s = m.wall_time if 0 < m.wall_time <= _MAX_WALL_S else 0.0  # not a number is neither
    return Pass(
        counter=m.counter_id,
        rank=m.dp_rank,
        wall_ns=int(wall_s * 1e9),
        prefill_requests=s.num_prefill_requests,
        prefill_tokens=s.sum_prefill_tokens,
        prefill_kv_tokens=s.sum_prefill_kv_tokens,
        decode_requests=s.num_decode_requests,
        decode_kv_tokens=s.sum_decode_kv_tokens,
        queued_requests=q.num_prefill_requests + q.num_decode_requests,
        # The heartbeat has no time and no request.
        idle=not wall_s and s == _NOTHING,
        gap=min(gap, _MAX_GAP),
    )


class PassFeed:
    """One publisher of one scheduler. ``start`` connects; marks go to *emit*."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], feed: Feed, state: FeedState, emit: Emit
    ) -> None:
        self._context, self._feed, self.state, self._emit = context, feed, state, emit
        self._sequence = Sequence()
        self._channel: Channel | None = None

    def start(self) -> None:
        """Connect; a wrong address is a state, not an error."""
        try:
            self._channel = Channel(
                self._context,
                self._feed.endpoint,
                self._on_message,
                self._on_connected,
                topic=self._feed.topic,
                max_bytes=MAX_PAYLOAD,
            )
        except EndpointError as e:
            self.state.state = "stopped"
            self.state.failed(str(e))

    def close(self) -> None:
        """Disconnect."""
        if self._channel:
            self._channel.close()

    def _on_connected(self, up: bool) -> None:
        self.state.state = "up" if up else "down"
        if not up:
            self.state.failed("the engine closed the connection")

    def _on_message(self, frames: Frames) -> None:
        seq = number(frames[1]) if len(frames) == 3 else None
        if seq is None or seq < 0:
            self.state.failed(f"a message of {len(frames)} frames, or without its number")
            return
        missed, restarted = self._sequence.place(seq)
        self._sequence.advance(seq)
        self.state.restarts += restarted
        self.state.gaps += missed > 0
        self.state.missed += missed
        self.state.events += 1
        try:
            body = decode(frames[2], missed)
        except PassDecodeError as e:
            self.state.failed(str(e))
            return
        # The feed has no time of its own: the pass ended just before.
        self._emit(self._feed, time.monotonic_ns(), body)
