"""A TCP server that does with each connection exactly what it is told, one system call at a time."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any


def scripted_server(name: str = "") -> Generator[Any, list[list[Any]], None]:
    """Yields its port; for each script received it serves one connection and yields what it read.

    *name* becomes the name of the process. A script is a list of steps; byte strings travel as Latin-1:

    * ``["read", how, n, step]``: read exactly n bytes by calls of at most *step*; how: read, readv, recv, recvmsg;
    * ``["write", how, parts]``: one call; how: write, writev, send, sendmsg;
    * ``["flood", n]``: send n bytes by as many calls as it takes; ``["sendfile", path]``;
    * ``["peek", n]``; ``["drain"]``: read until the client closes or resets;
    * ``["pause", s]``: sleep; ``["spin", s]``: keep the CPU busy;
    * ``["option", level, name, value]``: set a socket option; ``["abort"]``: close by a reset; ``["die"]``: SIGKILL.
    """
    if name:
        Path("/proc/self/comm").write_bytes(name.encode("latin-1"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=8)
    said: Any = {"port": listener.getsockname()[1]}
    while True:
        script = yield said
        connection, _ = listener.accept()
        said = {"read": 0, "error": ""}
        try:
            for step, *arguments in script:
                said["read"] += _STEPS[step](connection, *arguments)
        except OSError as e:
            said["error"] = type(e).__name__
        connection.close()


def _read(connection: socket.socket, how: str, n: int, step: int) -> int:
    done, fd = 0, connection.fileno()
    while done < n:
        size = min(step, n - done)
        # Uneven buffers, an empty one among them: a head may end anywhere.
        sizes = [size // 3, 0, size - size // 3]
        buffers = [bytearray(s) for s in sizes]
        if how == "read":
            got = len(os.read(fd, size))
        elif how == "readv":
            got = os.readv(fd, buffers)
        elif how == "recvmsg":
            got = connection.recvmsg_into(buffers)[0]
        else:
            got = len(connection.recv(size))
        if not got:
            raise ConnectionError("closed early")
        done += got
    return done


def _write(connection: socket.socket, how: str, parts: list[str]) -> int:
    raw = [p.encode("latin-1") for p in parts]
    if how == "write":
        os.write(connection.fileno(), b"".join(raw))
    elif how == "writev":
        os.writev(connection.fileno(), raw)
    elif how == "sendmsg":
        connection.sendmsg(raw)
    else:
        connection.send(b"".join(raw))
    return 0


def _flood(connection: socket.socket, n: int) -> int:
    left = n
    while left:
        left -= connection.send(bytes(min(left, 1 << 16)))
    return 0


def _sendfile(connection: socket.socket, path: str) -> int:
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    at = 0
    while at < size:
        at += os.sendfile(connection.fileno(), fd, at, size - at)
    os.close(fd)
    return 0


def _peek(connection: socket.socket, n: int) -> int:
    select.select([connection], [], [])
    connection.recv(n, socket.MSG_PEEK)
    connection.recvmsg(n, 0, socket.MSG_PEEK)
    return 0


def _drain(connection: socket.socket) -> int:
    total = 0
    while data := connection.recv(1 << 16):
        total += len(data)
    return total


def _pause(connection: socket.socket, seconds: float) -> int:
    time.sleep(seconds)
    return 0


def _spin(connection: socket.socket, seconds: float) -> int:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass
    return 0


def _option(connection: socket.socket, level: int, name: int, value: int) -> int:
    connection.setsockopt(level, name, value)
    return 0


def _abort(connection: socket.socket) -> int:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return 0


def _die(connection: socket.socket) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


_STEPS: dict[str, Callable[..., int]] = {
    "read": _read,
    "write": _write,
    "flood": _flood,
    "sendfile": _sendfile,
    "peek": _peek,
    "drain": _drain,
    "pause": _pause,
    "spin": _spin,
    "option": _option,
    "abort": _abort,
    "die": _die,
}
