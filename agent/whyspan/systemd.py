"""Tells the service manager how this process is: sd_notify(3) in one datagram per message, without a library.

Nothing is sent, and nothing fails, where no manager asked for it (``NOTIFY_SOCKET``). The supervisor of ``whyspan run``
asks its two processes in the same way.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import MutableMapping
from typing import Final

from whyspan.text import clean

log = logging.getLogger("whyspan.run")

SOCKET_ENV: Final = "NOTIFY_SOCKET"
WATCHDOG_ENV: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")
#: Pings per watchdog interval: sd_watchdog_enabled(3) recommends two; a late one then needs no luck.
_PINGS: Final = 4
_STATUS_LIMIT: Final = 400
_WAIT_S: Final = 5


class Notifier:
    """One process's line to its manager. Used from one thread; a child process must make its own."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Take the socket's address out of *environ* (default: the process's), so that no child speaks for this one."""
        env = os.environ if environ is None else environ
        address = env.pop(SOCKET_ENV, "")
        usec, pid = (env.pop(name, "") for name in WATCHDOG_ENV)
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        )
        if self._socket is not None:
            # What changes the service's state is waited for, as sd_notify(3) does, but not for ever.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _WAIT_S, 0))
        ours = self._socket is not None and usec.isdecimal() and pid in ("", str(os.getpid()))
        #: Between two pings, in s; 0 when nobody waits for them.
        self.ping_s = int(usec) / 1e6 / _PINGS if ours else 0.0
        self._pinged_s = 0.0
        self._status = ""
        self._failed = False

    @property
    def connected(self) -> bool:
        """Whether there is a manager."""
        return self._socket is not None

    def ready(self, status: str = "") -> None:
        """The start, or a reload, is done."""
        self._pinged_s = time.monotonic()
        pings = ["WATCHDOG=1"] if self.ping_s else []
        self._send("READY=1", *self._changed(status), *pings, wait=True)

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", wait=True)

    def stopping(self) -> None:
        """The end begins."""
        self._send("STOPPING=1", *self._changed("stopping"), wait=True)

    def extend(self, seconds: float, status: str = "") -> None:
        """The start takes at least *seconds* more, from now on; counts as a ping, too."""
        ping = ["WATCHDOG=1"] if self.ping_s else []
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}", *ping, *self._changed(status))

    def status(self, text: str) -> None:
        """Show one line in ``systemctl status``; sent only when it has changed."""
        changed = self._changed(text)
        if changed:
            self._send(*changed)

    def alive(self) -> None:
        """Ping, if it is time for it: call it whenever there has been progress, and only then."""
        now_s = time.monotonic()
        # One that a busy manager has no room for is sent again at the next progress.
        if self.ping_s and now_s - self._pinged_s >= self.ping_s and self._send("WATCHDOG=1"):
            self._pinged_s = now_s

    def _changed(self, status: str) -> list[str]:
        text = clean(status, _STATUS_LIMIT)
        if not text or text == self._status:
            return []
        self._status = text
        return [f"STATUS={text}"]

    def _send(self, *lines: str, wait: bool = False) -> bool:
        """Return False when it may be tried again: the manager is busy."""
        if self._socket is None:
            return True
        try:
            flags = 0 if wait else socket.MSG_DONTWAIT
            self._socket.sendto("\n".join(lines).encode(), flags, self._address)
            self._failed = False
        except BlockingIOError:
            return False
        except OSError as e:
            if not self._failed:
                log.warning("the service manager is not told: %s", e.strerror)
            self._failed = True
        return True


def parse(datagram: bytes) -> dict[str, str]:
    """Return the assignments of a message, as a manager reads them; what is none is left out."""
    lines = datagram.decode(errors="replace").split("\n")
    return {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
