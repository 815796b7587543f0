"""The collector's side of the link: a bounded queue and one thread that keeps the exporter supplied.

A finding leaves memory only when the exporter says that it is durable, so a killed exporter loses nothing:
``offered = acked + pending + dropped`` always holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from whyspan.model import Finding

from whyspan_exporters import link
from whyspan_exporters.link import Ack, Count, CountMsg, FindingFrame, Hello, LinkError, StatusMsg

log = logging.getLogger("whyspan.link")

_BACKOFF_S = (0.1, 5.0)
_CLOSING_RETRY_S = 0.05
_STATE_INTERVAL_S = 1.0  # counts and status go out at most this often
_MAX_SERIES = 1000
_OTHER = "other"
# Over this a frame could exceed the link's limit.
_MAX_FINDING_BYTES = link.MAX_FRAME_BYTES - 64


class Stats(NamedTuple):
    """Findings since the start, and the state of the link."""

    offered: int
    acked: int
    dropped: int
    pending: int
    connected: bool
    exporter_state: str  # why the exporter cannot commit now, such as "disk full"; empty when it can


class _Latest:
    """Tracks a value of which only the newest version matters: what was sent, what was acknowledged."""

    def __init__(self) -> None:
        self.version = self.sent = self.acked = 0
        self.seq = 0
        self.next_s = 0.0

    def due(self, now_s: float, closing: bool) -> bool:
        return self.version != self.sent and self.sent == self.acked and (closing or now_s >= self.next_s)

    def on_sent(self, seq: int, now_s: float) -> None:
        self.seq, self.sent, self.next_s = seq, self.version, now_s + _STATE_INTERVAL_S

    def on_ack(self, seq: int) -> None:
        if self.sent != self.acked and seq >= self.seq:
            self.acked = self.sent


class Client:
    """Sends findings, counts and status to the exporter. Thread-safe; no method but `close` waits."""

    def __init__(
        self,
        path: Path,
        *,
        capacity: int = 2000,
        max_bytes: int = 16 << 20,
        window: int = 64,
        instance: str = "",
    ) -> None:
        """Start the sending thread; the exporter need not be there yet.

        Args:
            path: The exporter's socket.
            capacity: Findings kept until they are acknowledged; at the bound the oldest unsent one goes.
            max_bytes: The same bound on their encoded size.
            window: Findings sent and not yet acknowledged, at most; these are never dropped.
            instance: Names this run of the collector; default: 16 random hex digits.
        """
        self.instance = instance or os.urandom(8).hex()
        self._path = path
        self._capacity, self._max_bytes = capacity, max_bytes
        self._most_sent = window
        self._window = min(window, capacity)
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()  # encoded findings not yet sent
        self._sent: deque[tuple[int, bytes]] = deque()  # sent on this connection, not acknowledged
        self._bytes = 0
        self._offered = self._acked = self._dropped = 0
        self._counts: dict[tuple[str, str, str], int] = {}
        self._status: dict[str, Any] = {}
        self._counts_state, self._status_state = _Latest(), _Latest()
        self._connected = False
        self._peer = 0
        self._exporter_state = ""
        self._seq = 0
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="whyspan-link", daemon=True)
        self._thread.start()

    @property
    def peer(self) -> int:
        """The exporter's process id, 0 before it was reached."""
        return self._peer

    def resize(self, capacity: int) -> None:
        """Keep so many findings until they are acknowledged; what is too much goes with the next one."""
        with self._lock:
            self._capacity, self._window = capacity, min(self._most_sent, capacity)

    def offer(self, finding: Finding) -> bool:
        """Queue *finding*, encoded before this returns. Returns False when it or an older one was dropped."""
        body = msgspec.msgpack.encode(finding)
        with self._lock:
            self._offered += 1
            if len(body) > _MAX_FINDING_BYTES or self._closing.is_set():
                self._dropped += 1
                return False
            self._queue.append(body)
            self._bytes += len(body)
            kept = True
            while self._queue and (
                len(self._queue) + len(self._sent) > self._capacity or self._bytes > self._max_bytes
            ):
                self._bytes -= len(self._queue.popleft())
                self._dropped += 1
                kept = False
            os.eventfd_write(self._wake, 1)
        return kept

    def count(self, name: str, n: int = 1, *, service: str = "", label: str = "") -> None:
        """Add *n* to a total, such as ``count("requests", service="chat", label="200")``.

        At most 1,000 series; further ones are added up under the label ``other``.
        """
        key = (name, service, label)
        with self._lock:
            if key not in self._counts and len(self._counts) >= _MAX_SERIES:
                key = (name, "", _OTHER)
            self._counts[key] = self._counts.get(key, 0) + n
            self._counts_state.version += 1

    def status(self, status: dict[str, Any]) -> None:
        """Replace the state that the store shows: JSON-like, under 1 MiB, not to be changed afterwards."""
        with self._lock:
            self._status = status
            self._status_state.version += 1

    def stats(self) -> Stats:
        """Return the link's own figures."""
        with self._lock:
            return Stats(
                offered=self._offered,
                acked=self._acked,
                dropped=self._dropped,
                pending=len(self._queue) + len(self._sent),
                connected=self._connected,
                exporter_state=self._exporter_state,
            )

    def close(self, timeout_s: float = 3.0) -> bool:
        """Send what is queued, wait for its acknowledgement at most *timeout_s*, and end the thread.

        Returns:
            Whether everything offered and not dropped is durable.
        """
        self._deadline_s = time.monotonic() + timeout_s
        self._closing.set()
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout_s + 1.0)
            if not self._thread.is_alive():
                os.close(self._wake)  # offers are refused by now
        if self._done():
            return True
        if pending := self.stats().pending:
            log.warning("%d findings were not taken by the exporter", pending)
        return False

    def _run(self) -> None:
        delay_s = _BACKOFF_S[0]
        while not self._finished():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.settimeout(1.0)
                    sock.connect(os.fspath(self._path))
                    credentials = sock.getsockopt(
                        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
                    )
                    self._peer = struct.unpack("3i", credentials)[0]
                    self._change_connected(True, "")
                    delay_s = _BACKOFF_S[0]
                    self._session(sock)
                    reason = "closing"
            except (OSError, LinkError) as exc:
                reason = str(exc)
            self._change_connected(False, reason)
            if not self._finished() and self._closing.wait(delay_s):
                time.sleep(_CLOSING_RETRY_S)
            delay_s = min(delay_s * 2, _BACKOFF_S[1])

    def _change_connected(self, connected: bool, reason: str) -> None:
        with self._lock:
            changed, self._connected = connected != self._connected, connected
        if changed:
            log.info(
                "exporter connected" if connected else f"exporter away ({reason}); findings wait in memory"
            )

    def _done(self) -> bool:
        with self._lock:
            states = (self._counts_state, self._status_state)
            return not self._queue and not self._sent and all(s.acked == s.version for s in states)

    def _finished(self) -> bool:
        return self._closing.is_set() and (self._done() or time.monotonic() >= self._deadline_s)

    def _session(self, sock: socket.socket) -> None:
        """Talk on one connection until it breaks (OSError, LinkError) or everything is done."""
        with self._lock:
            # The last connection's exporter may have died before it committed these: first in line again.
            self._queue.extendleft(body for _, body in reversed(self._sent))
            self._sent.clear()
            for state in (self._counts_state, self._status_state):
                state.sent = state.acked
        sock.setblocking(False)
        frames = link.Frames()
        out = bytearray(link.encode(Hello(link.PROTOCOL, self.instance)))
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._finished():
            self._fill(out)
            poll.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
            wait_s = _STATE_INTERVAL_S / 2
            if self._closing.is_set():
                wait_s = max(0.0, min(wait_s, self._deadline_s - time.monotonic()))
            for fd, _ in poll.poll(wait_s * 1000):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    continue
                with contextlib.suppress(BlockingIOError):
                    if out:
                        del out[: sock.send(out)]
                with contextlib.suppress(BlockingIOError):
                    data = sock.recv(65536)
                    if not data:
                        raise ConnectionResetError("it closed the connection")
                    for body in frames.feed(data):
                        self._on_ack(link.decode_to_collector(body))

    def _fill(self, out: bytearray) -> None:
        # Findings become frames only when there is room to send them, so that memory is not doubled.
        now_s = time.monotonic()
        with self._lock:
            while self._queue and len(self._sent) < self._window and len(out) < 1 << 18:
                body = self._queue.popleft()
                self._seq += 1
                self._sent.append((self._seq, body))
                out += link.encode(FindingFrame(self._seq, msgspec.Raw(body)))
            closing = self._closing.is_set()
            if self._counts_state.due(now_s, closing):
                counts = [Count(*key, value) for key, value in self._counts.items()]
                self._send_state(out, self._counts_state, CountMsg(0, counts), now_s)
            if self._status_state.due(now_s, closing):
                self._send_state(out, self._status_state, StatusMsg(0, self._status), now_s)

    def _send_state(
        self, out: bytearray, state: _Latest, message: CountMsg | StatusMsg, now_s: float
    ) -> None:
        self._seq += 1
        message.seq = self._seq
        state.on_sent(self._seq, now_s)
        try:
            out += link.encode(message)
        except LinkError as exc:
            log.warning("not sent: %s", exc)
            state.acked = state.sent

    def _on_ack(self, ack: Ack) -> None:
        with self._lock:
            while self._sent and self._sent[0][0] <= ack.seq:
                self._bytes -= len(self._sent.popleft()[1])
                self._acked += 1
            self._counts_state.on_ack(ack.seq)
            self._status_state.on_ack(ack.seq)
            changed, self._exporter_state = ack.state != self._exporter_state, ack.state
        if changed:
            log.info("exporter: %s", ack.state or "committing again")
