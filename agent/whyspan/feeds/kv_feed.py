"""Listens to an engine's KV-cache events, and asks for what it missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from whyspan import clock
from whyspan.feeds import kv_events, timing
from whyspan.feeds.kv_events import KvDecodeError
from whyspan.feeds.messages import Feed, FeedBody, FeedState
from whyspan.feeds.sequence import Sequence, number
from whyspan.feeds.subscriber import Channel, EndpointError, Frames
from whyspan.marks import KvBlocks

Emit = Callable[[Feed, int, FeedBody], None]

#: A publisher serves a replay between two batches, at most 0.1 s later.
_REPLAY_S: Final = 3.0
#: It sends all that it keeps (10,000 batches by default): not to be asked for all the time.
_REPLAY_EVERY_S: Final = 5.0
#: What arrives meanwhile is held; more ends the wait for the replay. Also of one replay.
_MAX_HELD: Final = 4096
_MAX_HELD_BYTES: Final = 32 << 20
_MAX_GAP: Final = 1 << 40


class KvFeed:
    """One publisher of one engine. ``start`` connects; marks go to *emit*."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], feed: Feed, state: FeedState, emit: Emit
    ) -> None:
        self._context, self._feed, self.state, self._emit = context, feed, state, emit
        self._sequence = Sequence()
        self._channel: Channel | None = None
        self._replay: Channel | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._held: list[tuple[int, bytes]] = []
        self._held_bytes = 0
        self._asked_s = -_REPLAY_EVERY_S
        self._offset_ns, self._offset_s = 0, -60.0

    def start(self) -> None:
        """Connect; a wrong address is a state, not an error."""
        try:
            self._channel = Channel(
                self._context,
                self._feed.endpoint,
                self._on_message,
                self._on_connected,
                topic=self._feed.topic,
                max_bytes=kv_events.MAX_PAYLOAD,
            )
        except EndpointError as e:
            self.state.state = "stopped"
            self.state.failed(str(e))

    def close(self) -> None:
        """Disconnect."""
        if self._channel:
            self._channel.close()
        self._end_replay()

    def _on_connected(self, up: bool) -> None:
        self.state.state = "up" if up else "down"
        if not up:
            self.state.failed("the engine closed the connection")

    def _on_message(self, frames: Frames) -> None:
        seq = number(frames[1]) if len(frames) == 3 else None
        if seq is None or seq < 0:
            self.state.failed(f"a message of {len(frames)} frames, or without its number")
            return
        if self._replay is not None:
            self._hold(seq, frames[2])
            return
        missed, restarted = self._sequence.place(seq)
        if restarted:
            self.state.restarts += 1
            self._sequence.next = 0
        if missed:
            self.state.gaps += 1
        if missed and self._ask():
            self._hold(seq, frames[2])
        else:
            self._take(seq, frames[2], replayed=False)

    def _ask(self) -> bool:
        """Ask for what was missed; False when that cannot be had, or was asked for a moment ago."""
        now_s = time.monotonic()
        if not self._feed.replay or now_s - self._asked_s < _REPLAY_EVERY_S:
            return False
        self._asked_s = now_s
        try:
            self._replay = Channel(
                self._context,
                self._feed.replay,
                self._on_replay,
                max_bytes=kv_events.MAX_PAYLOAD,
                hwm=_MAX_HELD,
            )
        except EndpointError as e:
            self.state.failed(f"replay: {e}")
            return False
        self._replay.send([b"", (self._sequence.next or 0).to_bytes(8, "big")])
        self._deadline = asyncio.get_running_loop().call_later(_REPLAY_S, self._gave_up)
        return True

    def _on_replay(self, frames: Frames) -> None:
        try:
            reply = kv_events.replay_reply(frames)
        except KvDecodeError as e:
            self.state.failed(str(e))
            return
        if reply.seq == kv_events.END:
            self._release()
        elif self._sequence.next is None or reply.seq >= self._sequence.next:
            self.state.repaired += 1
            self._take(reply.seq, reply.payload, replayed=True)

    def _gave_up(self) -> None:
        self.state.failed("replay: no end of it in time")
        self._release()

    def _hold(self, seq: int, payload: bytes) -> None:
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        if len(self._held) >= _MAX_HELD or self._held_bytes >= _MAX_HELD_BYTES:
            self._release()

    def _release(self) -> None:
        """Go on with what arrived during a replay: what it has brought already is left out."""
        self._end_replay()
        held, self._held, self._held_bytes = self._held, [], 0
        last = -1
        for seq, payload in held:
            if seq <= last:  # an engine that began anew meanwhile
                self.state.restarts += 1
                self._sequence.next = 0
            last = seq
            if self._sequence.next is None or seq >= self._sequence.next:
                self._take(seq, payload, replayed=False)
            else:
                self.state.repaired -= 1  # it was on its way anyhow

    def _end_replay(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None
        if self._replay:
            self._replay.close()
            self._replay = None

    def _take(self, seq: int, payload: bytes, *, replayed: bool) -> None:
        missed = min(self._sequence.place(seq).missed, _MAX_GAP)
        self._sequence.advance(seq)
        self.state.missed += missed
        now_ns = time.monotonic_ns()
        try:
            batch = kv_events.decode(payload, self._feed.engine, self._feed.rank)
        except KvDecodeError as e:
            self.state.failed(str(e))
            return
        self.state.events += batch.events
        if batch.unknown:
            self.state.failed(f"{batch.unknown} events of kinds that are not known")
        bodies = batch.bodies
        if missed and not bodies:
            bodies = [KvBlocks(engine=self._feed.engine, rank=self._feed.rank)]
        ts_ns = timing.mono_ns(batch.unix_s, self._offset(now_ns), now_ns)
        if replayed or missed:
            bodies = [
                msgspec.structs.replace(body, replayed=replayed, gap=0 if n else missed)
                for n, body in enumerate(bodies)
            ]
        for body in bodies:
            self._emit(self._feed, ts_ns, body)

    def _offset(self, now_ns: int) -> int:
        if now_ns / 1e9 - self._offset_s >= 60:  # the wall clock may be set
            self._offset_ns, self._offset_s = clock.offset_ns(), now_ns / 1e9
        return self._offset_ns
