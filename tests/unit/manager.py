"""A service manager for tests: a notification socket, and what came over it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import TracebackType

from whyspan.systemd import parse


class Manager:
    """A context manager; ``env`` makes a process report to it, ``heard`` is everything it has said so far."""

    def __init__(self, watchdog_s: float = 0.0) -> None:
        """*watchdog_s*: the interval in which pings are asked for; 0 for none."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")
        self.heard: list[dict[str, str]] = []
        self.env = {"NOTIFY_SOCKET": "@" + self._socket.getsockname()[1:].decode()}
        if watchdog_s:
            self.env["WATCHDOG_USEC"] = str(round(watchdog_s * 1e6))

    def until(self, seen: Callable[[dict[str, str]], object], timeout_s: float = 30.0) -> dict[str, str]:
        """Return the next message that *seen* is true of; fail when none comes."""
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"not said; heard: {self.heard}"
            message = self.next(left_s)
            if message is not None and seen(message):
                return message

    def next(self, timeout_s: float) -> dict[str, str] | None:
        """Return the next message, None when there is none in time."""
        self._socket.settimeout(timeout_s)
        try:
            self.heard.append(parse(self._socket.recv(4096)))
        except (TimeoutError, BlockingIOError):
            return None
        return self.heard[-1]

    def drain(self) -> None:
        """Take what has arrived."""
        while self.next(0.0) is not None:
            pass

    def __enter__(self) -> Manager:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the socket."""
        self._socket.close()
