"""Whether and where a process listens on TCP, also in a network namespace other than ours."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_LISTEN = b"0A"  # include/net/tcp_states.h: TCP_LISTEN
_MAX_TABLE_BYTES = 16 << 20
_MAX_FDS = 65_536


def listens(tgid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether the process has a listening TCP socket; False when it is gone or may not be read."""
    sockets = _listening(proc / str(tgid) / "net")
    return bool(sockets) and any(link in sockets for link in socket_links(tgid, proc))


def addresses(tgid: int, proc: Path = Path("/proc")) -> dict[int, str]:
    """Return the TCP ports on which the process listens, each with its address as text, such as ``0.0.0.0``.

    Empty when it is gone or may not be read. Of several addresses of one port, IPv4 wins.
    """
    sockets = _listening(proc / str(tgid) / "net")
    out: dict[int, str] = {}
    for link in socket_links(tgid, proc) if sockets else ():
        if link in sockets:
            host, port = _address(sockets[link])
            if port and (port not in out or ":" in out[port]):
                out[port] = host
    return out


def socket_links(tgid: int, proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield what the process's descriptors link to; nothing when it is gone or may not be read."""
    folder = proc / str(tgid) / "fd"
    try:
        for fd in os.listdir(folder)[:_MAX_FDS]:
            try:
                yield os.readlink(folder / fd)
            except OSError:
                continue
    except OSError:
        pass


def _address(text: str) -> tuple[str, int]:
    """Return host and port of an address as the tables have it: words in the machine's byte order, in hexadecimal."""
    host, _, port = text.partition(":")
    try:
        raw = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
        return str(ipaddress.ip_address(raw)), int(port, 16)
    except (ValueError, struct.error):
        return "", 0


def _listening(net: Path) -> dict[str, str]:
    """Return the listening sockets of a network namespace, as links in /proc/PID/fd name them, and their addresses.

    /proc/net is that of whoever reads it: psutil's answer for a process is only right in our own namespace.
    """
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        try:
            with (net / table).open("rb") as f:
                data = f.read(_MAX_TABLE_BYTES)
        except OSError:
            continue
        for line in data.splitlines()[1:]:
            fields = line.split(None, 10)
            if len(fields) > 9 and fields[3] == _LISTEN:
                found[f"socket:[{fields[9].decode()}]"] = fields[1].decode()
    return found
