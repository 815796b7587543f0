"""How it goes with one destination: the last error, and one log line per change of state."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from whyspan.clock import now_unix_ns
from whyspan.text import clean

from whyspan_exporters.otlp.settings import Target

log = logging.getLogger("whyspan.otlp")

_ERROR_CHARS: Final = 300


class Delivery:
    """The state of one target; thread-safe. The outbox counts."""

    def __init__(self, target: Target) -> None:
        """Nothing was tried yet."""
        self.target = target
        self._lock = threading.Lock()
        self._last_error = ""
        self._last_error_unix_ns = 0
        self._failing = self._rejecting = self._closing = False

    def close(self) -> None:
        """Log nothing from now on: what is cut short by the end says nothing about the receiver."""
        self._closing = True

    def taken(self) -> None:
        """The receiver took a request, and all of it unless `rejected` says so next."""
        with self._lock:
            recovered, self._failing = self._failing, False
        if recovered and not self._closing:
            log.info("otlp: %s reach %s again", self.target.signal, self.target.shown)

    def failing(self, reason: str) -> None:
        """The receiver did not take a request, for *reason*."""
        text = self._note(reason or "no reason was given")
        with self._lock:
            news, self._failing = not self._failing, True
        if news and not self._closing:
            log.warning("otlp: %s do not reach %s: %s", self.target.signal, self.target.shown, text)

    def rejected(self, items: int, reason: str) -> None:
        """What the receiver said of a request that it took: none of *items*, or a warning; logged the first time."""
        text = self._note(f"{items} rejected: {reason}" if items else f"warning: {reason}")
        with self._lock:
            news, self._rejecting = not self._rejecting, True
        if news and not self._closing:
            log.warning("otlp: %s at %s: %s", self.target.signal, self.target.shown, text)

    def status(self) -> dict[str, Any]:
        """Return everything, JSON-like, for `whyspan probes`."""
        with self._lock:
            return {
                "endpoint": self.target.shown,
                "protocol": self.target.protocol,
                "failing": self._failing,
                "last_error": self._last_error,
                "last_error_unix_ns": self._last_error_unix_ns,
            }

    def _note(self, reason: str) -> str:
        text = clean(self.target.redact(reason), _ERROR_CHARS)
        with self._lock:
            self._last_error, self._last_error_unix_ns = text, now_unix_ns()
        return text
