"""Whether a process listens on TCP, also in a network namespace other than ours."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = b"0A"  # include/net/tcp_states.h: TCP_LISTEN
_MAX_TABLE_BYTES = 16 << 20
_MAX_FDS = 65_536


def listens(tgid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether the process has a listening TCP socket; False when it is gone or may not be read."""
    sockets = _listening(proc / str(tgid) / "net")
    if not sockets:
        return False
    folder = proc / str(tgid) / "fd"
    try:
        for fd in os.listdir(folder)[:_MAX_FDS]:
            try:
                if os.readlink(folder / fd) in sockets:
                    return True
            except OSError:
                continue
    except OSError:
        pass
    return False


def _listening(net: Path) -> frozenset[str]:
    """Return the listening sockets of a network namespace, as links in /proc/PID/fd name them.

    /proc/net is that of whoever reads it: psutil's answer for a process is only right in our own namespace.
    """
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            with (net / table).open("rb") as f:
                data = f.read(_MAX_TABLE_BYTES)
        except OSError:
            continue
        for line in data.splitlines()[1:]:
            fields = line.split(None, 10)
            if len(fields) > 9 and fields[3] == _LISTEN:
                found.add(f"socket:[{fields[9].decode()}]")
    return frozenset(found)
