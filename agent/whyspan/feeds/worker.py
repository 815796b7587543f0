"""The feeds process: talks to the engines, and hands what they say to the collector.

Started by the collector with one end of a Unix socket (SOCK_SEQPACKET) as a descriptor; ends when the other end does.
It gives up every capability before it opens a connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections import deque
from typing import Final, Protocol

import msgspec
import zmq
from whyspan_exporters import privileges

from whyspan import log as logging_setup
from whyspan import selfuse
from whyspan.feeds import messages
from whyspan.feeds.forward_pass import PassFeed
from whyspan.feeds.kv_feed import KvFeed
from whyspan.feeds.messages import Entry, Feed, FeedBody, FeedsMessageError, FeedState, Marks, Report, Setup
from whyspan.feeds.polled import PolledFeed

log = logging.getLogger("whyspan.feeds")

_FLUSH_S: Final = 0.1
_REPORT_S: Final = 2.0
_MAX_QUEUED: Final = 4096
_PACKET_BYTES: Final = messages.MAX_PACKET - 1024  # of entries; the rest is the envelope
#: Of data, so that a publisher gone mad ends this process and nothing else.
_MAX_MEMORY: Final = 256 << 20


class _Running(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


class Worker:
    """Keeps the feeds that the collector asked for, and a bounded queue of what they said."""

    def __init__(self, link: socket.socket) -> None:
        """*link* leads to the collector."""
        link.setblocking(False)
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._setup = Setup(5.0, 2.0, [])
        self._feeds: dict[int, tuple[Feed, FeedState, _Running]] = {}
        self._queue: deque[bytes] = deque()
        self._lost = 0
        self._flushing: asyncio.TimerHandle | None = None
        self._done = self._loop.create_future()

    async def run(self) -> None:
        """Serve until the collector is gone."""
        self._loop.add_reader(self._link.fileno(), self._read)
        reporting = self._loop.create_task(self._report())
        try:
            await self._done
        finally:
            reporting.cancel()
            self._loop.remove_reader(self._link.fileno())
            if self._flushing:
                self._flushing.cancel()
            for _, _, running in self._feeds.values():
                running.close()
            if self._context:
                self._context.destroy(0)

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _read(self) -> None:
        try:
            packet = self._link.recv(messages.MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._end()
            return
        try:
            self._reconcile(messages.decode_setup(packet))
        except FeedsMessageError as e:
            log.error("from the collector: %s", e)
            self._end()

    def _reconcile(self, setup: Setup) -> None:
        wanted = {f.id: f for f in setup.feeds}
        for id_ in [i for i in self._feeds if i not in wanted]:
            feed, _, running = self._feeds.pop(id_)
            running.close()
            log.info("feed %s of %s: no longer wanted", feed.kind, feed.endpoint)
        self._setup = setup
        for feed in setup.feeds:
            if feed.id not in self._feeds:
                self._start(feed)

    def _start(self, feed: Feed) -> None:
        state = FeedState(feed.id)
        running = self._make(feed, state)
        if running is None:
            return
        self._feeds[feed.id] = feed, state, running
        running.start()
        log.info("feed %s of %s: listening", feed.kind, feed.endpoint)

    def _make(self, feed: Feed, state: FeedState) -> _Running | None:
        if feed.kind in (messages.METRICS, messages.HEALTH):
            interval_s, timeout_s = self._setup.interval_s, self._setup.timeout_s
            return PolledFeed(feed, state, self._emit, interval_s=interval_s, timeout_s=timeout_s)
        if feed.kind not in messages.KINDS:
            return None
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
            self._context.set(zmq.MAX_SOCKETS, 4 * messages.MAX_FEEDS)
        kind = KvFeed if feed.kind == messages.KV_EVENTS else PassFeed
        return kind(self._context, feed, state, self._emit)

    def _emit(self, feed: Feed, ts_ns: int, body: FeedBody) -> None:
        known = self._feeds.get(feed.id)
        if known is None:
            return
        known[1].marks += 1
        if len(self._queue) >= _MAX_QUEUED:
            self._lost += 1
            return
        self._queue.append(messages.encode(Entry(feed.id, ts_ns, body)))
        if self._flushing is None:
            self._flushing = self._loop.call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        while self._queue or self._lost:
            entries: list[msgspec.Raw] = []
            size = 0
            for raw in self._queue:
                size += len(raw)
                if entries and (size > _PACKET_BYTES or len(entries) >= messages.MAX_ENTRIES):
                    break
                entries.append(msgspec.Raw(raw))
            if not self._send(Marks(entries, self._lost)):
                self._flushing = self._loop.call_later(_FLUSH_S, self._flush)
                return
            self._lost = 0
            for _ in entries:
                self._queue.popleft()

    def _send(self, message: Marks | Report) -> bool:
        """Send a packet; False when the collector has not read those before."""
        try:
            self._link.send(messages.frame(message))
        except BlockingIOError:
            return False
        except OSError:
            self._end()
        return True

    async def _report(self) -> None:
        while True:
            states = [state for _, state, _ in self._feeds.values()]
            self._send(Report(states, selfuse.cpu_s(), selfuse.rss_bytes()))
            await asyncio.sleep(_REPORT_S)


async def _serve(link: socket.socket) -> None:
    await Worker(link).run()


def main() -> None:
    """Run until the collector closes its end."""
    parser = argparse.ArgumentParser(prog="whyspan-feeds", description="Internal: started by the collector.")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    logging_setup.setup()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the collector decides
    privileges.drop()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(socket.socket(fileno=arguments.fd)))


if __name__ == "__main__":
    main()
