"""Where supervised processes say how they are: the other side of `whyspan.systemd`."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Final

from whyspan.systemd import parse

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_BYTES: Final = 4096
_MAX_AT_ONCE: Final = 64


class NotifySocket:
    """A datagram socket with a name of its own; arrivals raise SIGIO, which must be blocked before this is made."""

    def __init__(self) -> None:
        """Bind it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # Anybody in this network namespace can write to it: the kernel says who did.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")
        name = self._socket.getsockname()
        self.address = "@" + name[1:].decode()
        fcntl.fcntl(self._socket, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._socket, fcntl.F_GETFL)
        fcntl.fcntl(self._socket, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_ASYNC)

    def read(self) -> list[tuple[int, dict[str, str]]]:
        """Return what has arrived: who sent it, and the assignments in it. Never waits."""
        out = []
        for _ in range(_MAX_AT_ONCE):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            for level, kind, body in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    out.append((_CREDENTIALS.unpack(body)[0], parse(data)))
        return out

    def close(self) -> None:
        """Close it."""
        self._socket.close()
