"""The two lines to a guest, both JSON by lines: to QEMU's monitor (QMP), and to its agent in the guest.

<https://www.qemu.org/docs/master/interop/qemu-ga-ref.html>, <https://www.qemu.org/docs/master/interop/qmp-spec.html>
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

_REPLY_S = 300.0  # a busy machine may give the guest no CPU for long
_SYNC_S = 5.0


class GuestError(Exception):
    """The guest did not boot, ended, or does not answer."""


class _Link:
    """One socket, on which a request is a line and so is its answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._buffer = b""

    def ask(self, name: str, **arguments: Any) -> Any:
        """Send one request, return its answer.

        Raises:
            GuestError: it is refused, or no answer comes.
        """
        self._send(name, arguments)
        while True:
            answer = self._receive(_REPLY_S)
            if "error" in answer:
                raise GuestError(f"{name}: {answer['error'].get('desc', '?')}")
            if "return" in answer:  # else an event
                return answer["return"]

    def close(self) -> None:
        """Close it."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def _send(self, name: str, arguments: dict[str, Any]) -> None:
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(str(self._path))
            except OSError:
                made.close()
                raise
            self._socket, self._buffer = made, b""
        self._socket.settimeout(_REPLY_S)
        self._socket.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._socket is not None
        self._socket.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise GuestError("no answer") from None
            if not data:
                self.close()
                raise GuestError("the line is closed")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class AgentLink(_Link):
    """To the agent in the guest."""

    def synchronised(self) -> bool:
        """Ask for a sign of life; whether it came. What was asked before and not answered is answered first."""
        token = time.monotonic_ns() & 0x7FFFFFFF
        try:
            self._send("guest-sync", {"id": token})
            while True:
                if self._receive(_SYNC_S).get("return") == token:
                    return True
        except (OSError, ValueError, GuestError):
            return False


class QmpLink(_Link):
    """To QEMU itself."""

    def __init__(self, path: Path) -> None:
        """Connect."""
        super().__init__(path)
        self.ask("qmp_capabilities")
