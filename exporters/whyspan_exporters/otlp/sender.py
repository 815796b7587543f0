"""One thread per signal: takes the oldest that waits, sends it, settles it; backs off while the receiver is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from tenacity import RetryCallState, Retrying, retry_if_result, stop_when_event_set, wait_random_exponential
from tenacity.nap import sleep_using_event

from whyspan_exporters.otlp.delivery import Delivery
from whyspan_exporters.otlp.spool_file import Parcel
from whyspan_exporters.otlp.transport import Answer, Kind, Transport

log = logging.getLogger("whyspan.otlp")

_ABORT_S: Final = 0.1
#: A receiver that asks for more is asked again then: it may have meant milliseconds.
_MAX_AFTER_S: Final = 600.0


class Pace(NamedTuple):
    """How fast, how much at once."""

    linger_s: float = 1.0  # what comes so soon after the first goes with it
    max_items: int = 512
    max_bytes: int = 1 << 20  # of more than one batch in a request
    first_s: float = 1.0  # back-off: at random up to this, which doubles ...
    last_s: float = 30.0  # ... up to this


PACE: Final = Pace()


class Source(Protocol):
    """Where parcels come from; the sender settles or releases each that it takes."""

    def take(self, signal: str, max_items: int, max_bytes: int) -> Parcel | None:
        """Return the oldest of *signal* in one parcel; None when nothing waits."""

    def settle(self, signal: str, parcel: Parcel, *, sent: int, failed: int) -> None:
        """The receiver answered: so many items are taken, so many must not be sent again."""

    def release(self, signal: str, parcel: Parcel) -> None:
        """It is to be sent again."""


class Sender:
    """In order: nothing is sent before what is older is settled."""

    def __init__(
        self,
        source: Source,
        delivery: Delivery,
        make: Callable[[], Transport],
        pace: Pace,
    ) -> None:
        """Start the thread. It calls *make*, and again before the next attempt if that raises."""
        self._signal = delivery.target.signal
        self._source, self._delivery, self._make, self._pace = source, delivery, make, pace
        self._transport: Transport | None = None
        self._apart = 0  # so many batches go one by one: together they were refused
        self._work = threading.Event()
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._backoff = wait_random_exponential(multiplier=pace.first_s, max=pace.last_s)
        self._retrying = Retrying(
            retry=retry_if_result(lambda answer: answer is not None and answer.kind is not Kind.TAKEN),
            wait=self._wait_s,
            sleep=sleep_using_event(self._closing),
            stop=stop_when_event_set(self._closing),
            retry_error_callback=_last_answer,
        )
        self._thread = threading.Thread(target=self._run, name=f"whyspan-{self._signal}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something waits to be sent."""
        self._work.set()

    def begin_close(self, timeout_s: float) -> None:
        """Send what waits for at most *timeout_s*, or until an attempt fails; `end_close` waits for that."""
        self._deadline_s = time.monotonic() + timeout_s
        self._closing.set()
        self._work.set()

    def end_close(self) -> None:
        """Wait for the end, and cut short what is on its way then: it stays where it was taken from."""
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._thread.is_alive() and (transport := self._transport) is not None:
            transport.close()
            # (Over HTTP nothing is cut short: the thread, a daemon, is left behind.)
            self._thread.join(_ABORT_S)

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            self._closing.wait(self._pace.linger_s)
            self._drain()
            if self._closing.is_set():
                break
        if self._transport is not None:
            self._transport.close()

    def _drain(self) -> None:
        """Send until nothing waits; when closing, until an attempt fails or the time is up."""
        while True:
            answer: Answer | None = self._retrying(self._attempt)
            if answer is None:
                return
            if self._closing.is_set() and (
                answer.kind is not Kind.TAKEN or time.monotonic() >= self._deadline_s
            ):
                return

    def _attempt(self) -> Answer | None:
        """Send one parcel; None when nothing waits."""
        try:
            parcel = self._source.take(
                self._signal, 1 if self._apart else self._pace.max_items, self._pace.max_bytes
            )
            if parcel is None:
                return None
            answer = self._send(parcel)
        except (
            Exception
        ) as exc:  # a wrong file, a header that is no latin-1, a bug: whatever it is, nothing is lost
            answer = Answer(Kind.LATER, f"{type(exc).__name__}: {exc}")
            self._delivery.failing(answer.reason)
        return answer

    def _send(self, parcel: Parcel) -> Answer | None:
        try:
            if self._transport is None:
                self._transport = self._make()
            answer = self._transport.send(parcel.payload)
        except BaseException:
            self._source.release(self._signal, parcel)
            raise
        if answer.kind is Kind.TAKEN:
            self._settle(parcel, answer.rejected)
            self._delivery.taken()
            if answer.rejected or answer.reason:
                self._delivery.rejected(answer.rejected, answer.reason)
            return answer
        self._delivery.failing(answer.reason)
        if answer.kind is Kind.LATER:
            self._source.release(self._signal, parcel)
        elif answer.smaller and len(parcel.batches) > 1:
            self._source.release(self._signal, parcel)
            self._apart = len(parcel.batches)
            return self._attempt()
        else:
            self._settle(parcel, parcel.items)
        return answer

    def _settle(self, parcel: Parcel, failed: int) -> None:
        failed = max(0, min(failed, parcel.items))
        self._apart = max(0, self._apart - len(parcel.batches))
        self._source.settle(self._signal, parcel, sent=parcel.items - failed, failed=failed)

    def _wait_s(self, state: RetryCallState) -> float:
        """Full jitter, also on top of what the receiver asks for: many agents were sent away at the same moment."""
        backoff_s: float = self._backoff(state)
        answer = _last_answer(state)
        after_s = min(answer.after_s, _MAX_AFTER_S) if answer is not None else 0.0
        return after_s + min(backoff_s, after_s / 10) if after_s else backoff_s


def _last_answer(state: RetryCallState) -> Answer | None:
    answer: Answer | None = state.outcome.result() if state.outcome is not None else None
    return answer
