"""What goes out over OTLP: encoded batches in, a spool on disk behind them, one sender per signal.

While the disk refuses a batch, it waits in memory and is sent from there; `Outbox.flush` says so, and the exporter does
not acknowledge the findings in it before they are either on disk or with the receiver.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan.clock import now_unix_ns
from whyspan.text import clean

from whyspan_exporters.otlp import transport
from whyspan_exporters.otlp.delivery import Delivery
from whyspan_exporters.otlp.sender import PACE, Pace, Sender
from whyspan_exporters.otlp.settings import Target
from whyspan_exporters.otlp.spool import Spool
from whyspan_exporters.otlp.spool_file import MAX_PAYLOAD_BYTES, Batch, Parcel, is_full

log = logging.getLogger("whyspan.otlp")

#: Of what waits in memory while the disk is full.
MAX_HELD_BYTES: Final = 8 << 20


class Flow(NamedTuple):
    """What became of one signal's items (spans, data points) since the spool was made: totals over restarts.

    ``offered = sent + failed + dropped + queued`` always holds.
    """

    offered: int
    sent: int  # taken by the receiver
    failed: int  # refused by the receiver for good: partial success, statuses that must not be tried again
    dropped: int  # lost here: the oldest at the bound, and what the disk gave back damaged
    queued: int  # wait or are on their way
    batches: int  # how many batches these are in


class OutboxFigures(NamedTuple):
    """The spool's state now; ``flows`` is by signal, one entry per signal that is on."""

    size_bytes: int  # on disk
    batches: int
    oldest_s: float  # age of the oldest batch; 0 when there is none
    state: str  # why batches wait in memory instead of on disk, such as "disk full"; else empty
    flows: Mapping[str, Flow]


class Outbox:
    """Thread-safe. No method but `close` waits for the network."""

    def __init__(
        self,
        targets: Sequence[Target],
        path: Path | None,
        max_bytes: int,
        *,
        now: Callable[[], int] = now_unix_ns,
        make: Callable[[Target], transport.Transport] = transport.make,
        pace: Pace | None = None,
    ) -> None:
        """Open the spool; `start` starts the threads. A spool that cannot be opened is a state, tried again.

        Args:
            targets: One per signal that is on.
            path: The spool's file; None keeps everything in memory.
            max_bytes: Bound of the spool on disk.
            now: Wall clock, ns since the epoch.
            make: Makes the transport of a target, in its sender's thread.
            pace: How fast to send, and how much at once; default: `sender.PACE`.
        """
        self._now, self._make, self._pace = now, make, pace or PACE
        self._lock = threading.Lock()
        self._spool = Spool(path, max_bytes)
        self._held: deque[Batch] = deque()  # in memory: the disk did not take them
        self._flying: dict[str, Parcel] = {}  # those of them that are on their way
        self._deliveries = {t.signal: Delivery(t) for t in targets}
        self._senders: dict[str, Sender] = {}
        self._state = ""
        self._full = self._closed = False
        with self._lock, self._disk():
            self._spool.open()

    def start(self) -> None:
        """Start the senders: after the process has given up its capabilities, which are a thread's."""
        for signal, delivery in self._deliveries.items():
            target = delivery.target
            log.info("otlp: %s go to %s by %s", signal, target.shown, target.protocol)
            self._senders[signal] = Sender(self, delivery, partial(self._make, target), self._pace)
            if left := self._spool.queued(signal).items:
                log.info("otlp: %d items of %s wait since before the start", left, signal)
                self._senders[signal].wake()

    def put(self, signal: str, payload: bytes, items: int) -> None:
        """Take one serialised ``Export...ServiceRequest``; durable at the return, unless the disk refuses it.

        Args:
            signal: traces or metrics. Without a destination for it nothing happens.
            payload: As OpenTelemetry's encoders make it. At most 3 MiB: more is dropped, and counted.
            items: How many spans or data points it holds.
        """
        if signal not in self._deliveries:
            return
        if len(payload) > MAX_PAYLOAD_BYTES:
            self.drop(signal, items, f"a batch of {len(payload)} bytes is too big")
            return
        with self._lock:
            self._held.append(Batch(signal, payload, items, self._now()))
            self._store()
        if signal in self._senders:
            self._senders[signal].wake()

    def drop(self, signal: str, items: int, reason: str) -> None:
        """Count *items* that cannot be sent at all."""
        log.warning("otlp: %d items of %s are dropped: %s", items, signal, clean(reason, 300))
        with self._lock:
            self._spool.count(signal, offered=items, dropped=items)

    def flush(self) -> str:
        """Try the disk again. Returns "" when no spans wait in memory only, else why they do."""
        with self._lock:
            self._store()
            waits = any(b.signal == "traces" for b in self._held)
            return (self._state or "spans wait in memory") if waits else ""

    def figures(self) -> OutboxFigures:
        """Return the figures as of now; costs two look-ups in the spool."""
        with self._lock:
            times = [b.unix_ns for b in self._held]
            if not self._closed:
                with self._disk():
                    times += [at for at in (self._spool.oldest_unix_ns(),) if at]
            flows = {signal: self._flow(signal) for signal in self._deliveries}
            return OutboxFigures(
                size_bytes=self._spool.size_bytes(),
                batches=sum(f.batches for f in flows.values()),
                oldest_s=max(0.0, (self._now() - min(times)) / 1e9) if times else 0.0,
                state=self._state,
                flows=flows,
            )

    def status(self) -> dict[str, Any]:
        """Return what `whyspan probes` shows: the spool, and each signal's flow and delivery."""
        figures = self.figures()
        spool = {
            "state": figures.state,
            "bytes": figures.size_bytes,
            "max_bytes": self._spool.max_bytes,
            "batches": figures.batches,
            "oldest_s": figures.oldest_s,
        }
        signals = {s: flow._asdict() | self._deliveries[s].status() for s, flow in figures.flows.items()}
        return {"spool": spool, **signals}

    def close(self, timeout_s: float) -> None:
        """Send what is queued for at most *timeout_s*; the rest stays on disk for the next start."""
        if self._closed:
            return
        for delivery in self._deliveries.values():
            delivery.close()
        for sender in self._senders.values():
            sender.begin_close(timeout_s)
        for sender in self._senders.values():
            sender.end_close()
        with self._lock:
            self._store()
            self._closed = True
            self._spool.close()
            left = {s: flow.queued for s in self._deliveries if (flow := self._flow(s)).queued}
            if self._held:
                log.warning("otlp: %d batches were in memory only: %s", len(self._held), self._state)
        if left:
            log.info(
                "otlp: kept for the next start: %s", ", ".join(f"{n} items of {s}" for s, n in left.items())
            )

    # What the senders call.

    def take(self, signal: str, max_items: int, max_bytes: int) -> Parcel | None:
        """See `sender.Source`."""
        with self._lock:
            if self._closed:
                return None
            self._store()
            with self._disk():
                parcel = self._spool.head(signal, max_items, max_bytes)
                if parcel is not None:
                    return parcel
            taken: list[Batch] = []
            for batch in (b for b in self._held if b.signal == signal):
                items, size = sum(b.items for b in taken), sum(len(b.payload) for b in taken)
                if taken and (items + batch.items > max_items or size + len(batch.payload) > max_bytes):
                    break
                taken.append(batch)
            if not taken:
                return None
            self._flying[signal] = Parcel(0, tuple(taken))
            return self._flying[signal]

    def settle(self, signal: str, parcel: Parcel, *, sent: int, failed: int) -> None:
        """See `sender.Source`."""
        with self._lock:
            if self._closed:
                return
            if parcel.last_seq:
                with self._disk():
                    self._spool.settle(signal, parcel, sent=sent, failed=failed)
                return
            self._flying.pop(signal, None)
            self._forget(parcel.batches)
            self._spool.count(signal, offered=parcel.items, sent=sent, failed=failed)
            self._store()

    def release(self, signal: str, parcel: Parcel) -> None:
        """See `sender.Source`."""
        with self._lock:
            if parcel.last_seq:
                self._spool.release(signal)
            else:
                self._flying.pop(signal, None)

    def _flow(self, signal: str) -> Flow:
        held = [b for b in self._held if b.signal == signal]
        held_items = sum(b.items for b in held)
        queued = self._spool.queued(signal)
        sent, failed, dropped = (self._spool.total(signal, what) for what in ("sent", "failed", "dropped"))
        offered = self._spool.total(signal, "offered") + held_items
        return Flow(offered, sent, failed, dropped, queued.items + held_items, queued.batches + len(held))

    def _store(self) -> None:
        """Move what waits in memory to the disk, when that works and nothing of it is on its way."""
        if self._closed or not self._held:
            return
        if not self._flying:
            dropped = self._dropped()
            with self._disk(clears=True):
                self._spool.append(tuple(self._held))
                self._held.clear()
                self._tell_full(self._dropped() > dropped)
        self._bound()

    def _bound(self) -> None:
        size = sum(len(b.payload) for b in self._held)
        flying = {id(b) for parcel in self._flying.values() for b in parcel.batches}
        for batch in list(self._held) if size > MAX_HELD_BYTES else ():
            if id(batch) not in flying and size > MAX_HELD_BYTES:
                size -= len(batch.payload)
                self._forget((batch,))
                self._spool.count(batch.signal, offered=batch.items, dropped=batch.items)

    def _forget(self, batches: Sequence[Batch]) -> None:
        gone = {id(b) for b in batches}
        self._held = deque(b for b in self._held if id(b) not in gone)

    def _dropped(self) -> int:
        return sum(self._spool.total(s, "dropped") for s in self._deliveries)

    def _tell_full(self, dropping: bool) -> None:
        if dropping and not self._full:
            log.warning("otlp: the spool of %d MiB is full: the oldest go", self._spool.max_bytes >> 20)
            self._full = True
        elif not dropping and not any(self._spool.queued(s).batches for s in self._deliveries):
            self._full = False

    @contextlib.contextmanager
    def _disk(self, clears: bool = False) -> Iterator[None]:
        """What fails within is a state, told once; what *clears* it when it works has written a batch."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            state = "disk full" if is_full(exc) else clean(str(exc), 200)
            if not self._state:
                log.warning("otlp: the spool cannot be written: %s; what comes now waits in memory", state)
            self._state = state
        else:
            if clears and self._state:
                log.info("otlp: the spool can be written again")
                self._state = ""
