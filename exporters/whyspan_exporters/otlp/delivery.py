"""What became of what was sent to one destination: counts, the last error, and one log line per change of state."""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any, Final

from whyspan.clock import now_unix_ns
from whyspan.text import clean

from whyspan_exporters.otlp.settings import Target

log = logging.getLogger("whyspan.otlp")

_ERROR_CHARS: Final = 300


class Reasons(logging.Handler):
    """Knows why the last export of each thread failed.

    Takes the SDK's log lines out of ours and keeps the last: often its only word on the matter.
    """

    def __init__(self) -> None:
        """Nothing is taken yet; see `reasons`."""
        super().__init__(logging.WARNING)
        self._last = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's message."""
        message = record.getMessage()
        # "failed due to timeout, max retries or shutdown" names no cause; the retry before it did.
        if record.levelno >= logging.ERROR and ":" not in message:
            message = f"{message} {getattr(self._last, 'message', '')}".strip()
        self._last.message = message

    def note(self, cause: str) -> None:
        """Keep a better reason than the SDK's log has, for this thread."""
        self._last.cause = cause

    def take(self) -> str:
        """Return what is known in this thread, once."""
        cause: str = getattr(self._last, "cause", "") or getattr(self._last, "message", "")
        self._last.cause = self._last.message = ""
        return cause


@cache
def _only() -> Reasons:
    taker = Reasons()
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.addHandler(taker)
    return taker


def reasons() -> Reasons:
    """Take over the logger ``opentelemetry``, with those of the exporters imported so far, until the process ends.

    Not shorter: a thread of the SDK may outlive everything else, and would then speak in our log.
    """
    # Against floods some do not log the same message twice in 20 s; here each is the reason of one failure.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry.exporter."):
            logging.getLogger(name).filters.clear()
    return _only()


class Delivery:
    """Counts for one target; thread-safe."""

    def __init__(self, target: Target) -> None:
        """Count what goes to *target*."""
        self.target = target
        self._lock = threading.Lock()
        self._sent = self._failed = self._dropped = 0
        self._last_error = ""
        self._last_error_unix_ns = 0
        self._failing = self._closing = False

    def close(self) -> None:
        """Log nothing from now on: what is cut short by the end says nothing about the receiver."""
        self._closing = True

    def sent(self, n: int) -> None:
        """Count *n* items as taken by the receiver."""
        with self._lock:
            self._sent += n
            recovered, self._failing = self._failing, False
        if recovered and not self._closing:
            log.info("otlp: %s reach %s again", self.target.signal, self.target.shown)

    def failed(self, n: int, reason: str) -> None:
        """Count *n* items as lost after the SDK's own retries."""
        text = clean(self.target.redact(reason or "the SDK's exporter gave no reason"), _ERROR_CHARS)
        with self._lock:
            self._failed += n
            self._last_error, self._last_error_unix_ns = text, now_unix_ns()
            news, self._failing = not self._failing, True
        if news and not self._closing:
            log.warning("otlp: %s do not reach %s: %s", self.target.signal, self.target.shown, text)

    def dropped(self, n: int) -> None:
        """Count *n* items that were never tried: the queue was full, or the process ended."""
        with self._lock:
            self._dropped += n

    def counts(self) -> dict[str, int]:
        """Return sent, failed and dropped."""
        with self._lock:
            return {"sent": self._sent, "failed": self._failed, "dropped": self._dropped}

    def status(self) -> dict[str, Any]:
        """Return everything, JSON-like, for `whyspan probes`."""
        with self._lock:
            return {
                "endpoint": self.target.shown,
                "protocol": self.target.protocol,
                "sent": self._sent,
                "failed": self._failed,
                "dropped": self._dropped,
                "failing": self._failing,
                "last_error": self._last_error,
                "last_error_unix_ns": self._last_error_unix_ns,
            }
