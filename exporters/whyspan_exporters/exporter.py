"""The exporter process: takes findings from the collector's socket, commits them to every sink, acknowledges.

Holds no capability. Run as ``python -m whyspan_exporters.exporter [--config FILE] [--verbose]``.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whyspan import clock, selfuse
from whyspan import log as logging_setup
from whyspan.config import load_config
from whyspan.errors import WhyspanError
from whyspan.systemd import Notifier
from whyspan.text import clean

from whyspan_exporters import link, privileges
from whyspan_exporters.endpoint import Endpoint
from whyspan_exporters.link import Ack, CountMsg, FindingMsg, Hello, LinkError
from whyspan_exporters.records import EXPORTER, Counts, Explained, Record, Status, finding_id
from whyspan_exporters.reload import Reloader
from whyspan_exporters.sharing import may_deliver
from whyspan_exporters.sinks import Sink, open_sinks

log = logging.getLogger("whyspan.exporter")

BATCH_FINDINGS = 64
BATCH_BYTES = 2 << 20
BATCH_S = 0.2
_RETRY_S = 1.0
_IDLE_S = 10.0  # lets sinks forget what is too old, and say that they are there
_STATUS_EVERY_S = 1.0
_REFUSALS_EVERY_S = 60.0  # in the log
_RECV_BYTES = 1 << 16
_MAX_CONNECTIONS = 8


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = link.Frames()
        self.instance = ""
        self.received_seq = self.acked_seq = 0
        self.told_state = ""


class Exporter:
    """The loop. One thread; sinks are called from it."""

    def __init__(
        self,
        listener: socket.socket,
        sinks: Mapping[str, Sink],
        notifier: Notifier | None = None,
        reload: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve *listener* (bound, listening); *sinks* stay the caller's to close, and to replace in *reload*."""
        self._sinks = sinks
        self._notifier, self._reload_sinks = notifier or Notifier({}), reload
        self._broken: set[str] = set()
        self._connections: set[_Connection] = set()
        self._records: list[Record] = []
        self._batch_bytes = 0
        self._flush_at_s = time.monotonic() + _IDLE_S
        self._dirty = False
        self._next_status_s = self._next_refusal_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self, signals: socket.socket) -> None:
        """Serve until *signals* (numbers, as bytes) brings one; SIGHUP reloads. Then commit what has been received."""
        self._selector.register(signals, selectors.EVENT_READ, signals)
        self._notifier.ready(self._line(""))
        while True:
            timeout_s = max(0.0, self._flush_at_s - time.monotonic())
            if self._notifier.ping_s:
                timeout_s = min(timeout_s, self._notifier.ping_s)
            for key, _ in self._selector.select(timeout_s):
                if key.data is signals:
                    if set(signals.recv(64)) - {signal.SIGHUP}:
                        self._notifier.stopping()
                        self._drain()
                        return
                    self._reload()
                    continue
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
                if len(self._records) >= BATCH_FINDINGS or self._batch_bytes >= BATCH_BYTES:
                    self._flush()
            if time.monotonic() >= self._flush_at_s:
                self._flush()
            self._notifier.alive()

    def _reload(self) -> None:
        self._notifier.reloading()
        self._flush()
        if self._dirty:
            # What a sink could not commit goes with it: collectors connect again, and send what is not acknowledged.
            for connection in list(self._connections):
                self._close(connection, "")
        self._broken.clear()
        self._reload_sinks()
        self._flush_at_s = time.monotonic()
        self._notifier.ready(self._line(""))

    def _line(self, state: str) -> str:
        return f"{state or 'committing'}; to {', '.join(self._sinks)}; collectors connected: {len(self._connections)}"

    def _drain(self) -> None:
        for connection in list(self._connections):
            while self._read(connection):
                pass
        self._flush()
        for connection in list(self._connections):
            self._close(connection, "")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if not may_deliver(uid) or len(self._connections) >= _MAX_CONNECTIONS:
            self._refuse(uid)
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _refuse(self, uid: int) -> None:
        # Any reader of the store can come here, again and again: the log is not theirs to fill.
        now_s = time.monotonic()
        if now_s >= self._next_refusal_s:
            self._next_refusal_s = now_s + _REFUSALS_EVERY_S
            log.warning("refused a connection of user %d", uid)

    def _read(self, connection: _Connection) -> bool:
        # Returns whether there may be more to read.
        try:
            data = connection.sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return False
        except OSError as exc:
            self._close(connection, str(exc))
            return False
        if not data:
            self._close(connection, "")
            return False
        self._batch_bytes += len(data)
        try:
            for body in connection.frames.feed(data):
                self._on_message(connection, link.decode_to_exporter(body))
        except LinkError as exc:
            self._close(connection, str(exc))
            return False
        return True

    def _on_message(self, connection: _Connection, message: link.ToExporter) -> None:
        if isinstance(message, Hello):
            if message.protocol != link.PROTOCOL or connection.instance:
                raise LinkError(f"unexpected hello, protocol {message.protocol}")
            connection.instance = clean(message.instance, 64)
            log.info("collector %s connected", connection.instance)
            return
        if not connection.instance:
            raise LinkError("no hello")
        if not self._dirty:
            self._dirty = True
            self._flush_at_s = time.monotonic() + BATCH_S
        connection.received_seq = message.seq
        if isinstance(message, FindingMsg):
            finding = message.finding
            start = clock.to_unix_ns(finding.request.start_ns, clock.offset_ns())
            self._records.append(Explained(finding_id(connection.instance, finding), start, finding))
        elif isinstance(message, CountMsg):
            self._records.append(Counts(connection.instance, message.counts))
        else:
            self._records.append(Status(connection.instance, message.status))

    def _flush(self) -> None:
        """Commit, then acknowledge. When a sink cannot commit, nothing is acknowledged and it is retried."""
        records, self._records, self._batch_bytes = self._records, [], 0
        now_s = time.monotonic()
        if now_s >= self._next_status_s:
            self._next_status_s = now_s + _STATUS_EVERY_S
            records.append(Status(EXPORTER, self._status()))
        reasons = []
        for name, sink in self._sinks.items():
            try:
                sink.emit(records)
                reason = sink.flush()
            except Exception:
                self._broke(name)
                continue
            if reason:
                reasons.append(f"{name}: {reason}")
        state = "; ".join(reasons)
        self._notifier.status(self._line(state))
        self._dirty = bool(state)
        self._flush_at_s = time.monotonic() + (_RETRY_S if state else _IDLE_S)
        for connection in list(self._connections):
            seq = connection.acked_seq if state else connection.received_seq
            if (seq, state) == (connection.acked_seq, connection.told_state):
                continue
            try:
                connection.sock.sendall(link.encode(Ack(seq, state)))
            except OSError as exc:  # a full socket too: the collector reconnects and sends again
                self._close(connection, f"cannot acknowledge: {exc}")
                continue
            connection.acked_seq, connection.told_state = seq, state

    def _broke(self, name: str) -> None:
        # A bug in one sink must not keep findings from the others, or from being acknowledged.
        if name not in self._broken:
            self._broken.add(name)
            log.exception("sink %s failed", name)

    def _status(self) -> dict[str, Any]:
        sinks = {}
        for name, sink in self._sinks.items():
            try:
                sinks[name] = sink.status()
            except Exception:
                self._broke(name)
        return {
            "tgid": os.getpid(),
            "cpu_s": selfuse.cpu_s(),
            "rss_bytes": selfuse.rss_bytes(),
            "sinks": sinks,
        }

    def _close(self, connection: _Connection, reason: str) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if reason:
            log.warning("closed the connection of collector %s: %s", connection.instance or "?", reason)
        else:
            log.info("collector %s disconnected", connection.instance or "?")


def _close_all(sinks: Mapping[str, Sink]) -> None:
    with contextlib.ExitStack() as stack:  # one that fails keeps none open
        for sink in sinks.values():
            stack.callback(sink.close)


def serve(config_path: Path | None) -> None:
    """Run the exporter until SIGTERM or SIGINT; SIGHUP has it read its configuration again.

    Raises:
        WhyspanError: The configuration is wrong, another exporter runs, or a sink cannot be opened.
    """
    os.umask(0o027)
    notifier = Notifier()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    config = load_config(config_path)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(Endpoint(config.socket_path))
        sinks = open_sinks(config)
        stack.callback(_close_all, sinks)
        reloader = Reloader(config, lambda: load_config(config_path), sinks)
        privileges.drop()
        log.info("listening on %s, sinks: %s", config.socket_path, ", ".join(sinks))
        Exporter(endpoint.listener, sinks, notifier, reloader.reload).run(reader)
    log.info("stopped, everything received is committed")


def main() -> None:
    """Run as a program: exit status 0 after SIGTERM, else that of the error."""
    parser = argparse.ArgumentParser(prog="whyspan_exporters.exporter", description=__doc__)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    logging_setup.setup(args.verbose)
    faulthandler.enable()  # the watchdog's SIGABRT: each thread says where it is
    try:
        serve(args.config)
    except WhyspanError as exc:
        log.error("%s", exc)
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
