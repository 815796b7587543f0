"""A ZeroMQ socket in an asyncio loop: messages in bunches, a bound on all that is kept, and whether it is connected."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from typing import Final

import zmq

#: Messages that wait in this process, per socket; a publisher keeps or drops what is more, which shows as a gap.
RECEIVE_HWM: Final = 128
_RECONNECT_MS: Final = (200, 5000)
#: After messages were read the next are left to gather for a moment: 40 wake-ups a second at most.
_PAUSE_S: Final = 0.025
_BUNCH: Final = 256  # messages; with the pause a bound on the CPU that a publisher can cost
_NOBLOCK: Final = int(zmq.NOBLOCK)  # as a number: adding up enumerations takes longer than receiving
_EVENT: Final = struct.Struct("=Hi")  # zmq_socket_monitor(3): event and value

Frames = list[bytes]


class EndpointError(ValueError):
    """An address that cannot be connected to; the message says why."""


class Channel:
    """One SUB or DEALER socket, connected by name; it reconnects by itself, with back-off."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_message: Callable[[Frames], None],
        on_connected: Callable[[bool], None] = lambda _: None,
        *,
        topic: str | None = None,
        max_bytes: int,
        hwm: int = RECEIVE_HWM,
    ) -> None:
        """Connect.

        Args:
            context: The process's.
            endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``.
            on_message: Called with each message.
            on_connected: Called with True and False.
            topic: What to subscribe to; None makes a DEALER.
            max_bytes: Of one frame; a peer that sends more is disconnected.
            hwm: Messages that may wait.

        Raises:
            EndpointError: the address is none, or not allowed.
        """
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            if not path.startswith("@") and os.path.exists(path) and not os.access(path, os.W_OK):
                raise EndpointError(f"not permitted to connect to {path}: it is another user's")
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_connected = on_message, on_connected
        self._socket = context.socket(zmq.DEALER if topic is None else zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False
        try:
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.RCVHWM, hwm),
                (zmq.SNDHWM, 4),
                (zmq.MAXMSGSIZE, max_bytes),
                (zmq.RECONNECT_IVL, _RECONNECT_MS[0]),
                (zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1]),
                # A host that vanishes without a word is noticed.
                (zmq.HEARTBEAT_IVL, 10_000),
                (zmq.HEARTBEAT_TIMEOUT, 20_000),
                (zmq.IPV6, 1),
            ):
                self._socket.setsockopt(option, value)
            if topic is not None:
                self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            self._socket.connect(endpoint)
        except zmq.ZMQError as e:
            self.close()
            raise EndpointError(f"{endpoint}: {e.strerror}") from e
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        # As with messages: no change is told before the first look.
        self._read_monitor()
        self._watch()

    def send(self, frames: Frames) -> None:
        """Send a message, or nothing when none can be sent now."""
        try:
            self._socket.send_multipart(frames, _NOBLOCK)
        except zmq.ZMQError:
            pass
        self._again()  # sending may have taken the signal that something arrived

    def close(self) -> None:
        """End it; harmless twice."""
        if self.closed:
            return
        self.closed = True
        if self._timer:
            self._timer.cancel()
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.FD)
            self._loop.remove_reader(self._socket.FD)
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(0)

    def _again(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_later(_PAUSE_S, self._watch)

    def _watch(self) -> None:
        # The descriptor tells of a change only (zmq_getsockopt(3), ZMQ_FD): read first, then wait for the next.
        self._timer = None
        if not self.closed and self._drain() == 0 and not self.closed:
            self._loop.add_reader(self._socket.FD, self._on_readable)
        elif not self.closed:
            self._again()

    def _on_readable(self) -> None:
        if self._drain() and not self.closed:
            self._again()

    def _drain(self) -> int:
        got = 0
        while got < _BUNCH and not self.closed:
            try:
                frames = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                break
            got += 1
            self._on_message(frames)
        return got

    def _read_monitor(self) -> None:
        while self._monitor is not None and not self.closed:
            try:
                event, _ = self._monitor.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            number, _ = _EVENT.unpack(event[: _EVENT.size])
            self._on_connected(number == zmq.EVENT_HANDSHAKE_SUCCEEDED)
