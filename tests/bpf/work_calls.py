"""Workloads that make each kind of call a counted number of times. See ``workloads``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from tests.bpf.work_descriptors import LIMIT
from tests.bpf.work_sched import Work, wait_blocked

SYS_ACCEPT, SYS_SOCKET, SYS_OPENAT, SYS_ACCEPT4 = 43, 41, 257, 288  # x86-64
SYS_EVENTFD2, SYS_EPOLL_CREATE1, SYS_PIPE2, SYS_READ = 290, 291, 293, 0
#: What a send by two messages in one call is marked with.
MANY = "many"

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("iov", ctypes.POINTER(_Iovec)),
        ("iovs", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """struct mmsghdr."""

    _fields_ = (("header", _Header), ("done", ctypes.c_uint32))


def _many(call: Callable[..., int], fd: int, sizes: tuple[int, int]) -> None:
    """sendmmsg or recvmmsg of two messages."""
    buffers = [ctypes.create_string_buffer(size) for size in sizes]
    iovs = [(_Iovec * 1)(_Iovec(ctypes.addressof(b), len(b))) for b in buffers]
    messages = (_Message * 2)(*(_Message(_Header(iov=iov, iovs=1)) for iov in iovs))
    done = call(fd, messages, 2, 0, *([None] if call is _libc.recvmmsg else []))
    assert done == 2, f"{done} of 2 messages"


def _pairs() -> Iterator[tuple[socket.socket, socket.socket]]:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as listener:
            near = socket.create_connection(listener.getsockname()[:2])
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield near, listener.accept()[0]
    yield socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


def _ways(
    near: socket.socket, far: socket.socket
) -> list[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Each way to send and to receive so many bytes."""
    out, back = near.fileno(), far.fileno()
    return [
        (lambda n: os.write(out, bytes(n)), lambda n: os.read(back, n)),
        (
            lambda n: os.writev(out, [bytes(3), bytes(n - 3)]),
            lambda n: os.readv(back, [bytearray(2), bytearray(n - 2)]),
        ),
        (lambda n: near.send(bytes(n)), far.recv),
        (lambda n: near.sendmsg([bytes(2), bytes(n - 2)]), far.recvmsg),
    ]


def socket_calls(count: str) -> Work:
    """Send and receive by every call and family, *count* times; says in order what each moved, and sendfile's total."""
    pairs = list(_pairs())
    yield {"tid": threading.get_native_id()}
    moved: list[tuple[str, int, int, str]] = []
    size = 7
    for near, far in pairs:
        out, back, family = near.fileno(), far.fileno(), int(near.family)
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            near.recv(1)  # fails: nothing moves
        near.setblocking(True)
        for _ in range(int(count)):
            for send, receive in _ways(near, far):
                send(size)
                far.recv(2, socket.MSG_PEEK)
                receive(size)
                moved += [("send", family, size, ""), ("recv", family, size, "")]
                size += 1
            sizes = (size, size + 1)
            _many(_libc.sendmmsg, out, sizes)
            _many(_libc.recvmmsg, back, sizes)
            moved += [(way, family, s, MANY) for way in ("send", "recv") for s in sizes]
            size += 2
    total = 20_011
    with tempfile.TemporaryFile() as file:
        file.write(bytes(total))
        file.flush()
        sent = 0
        while sent < total:
            sent += os.sendfile(pairs[0][0].fileno(), file.fileno(), sent, total - sent)
    yield {"moved": moved, "sendfile": total}


def refusals(count: str) -> Work:
    """Fail *count* times for lack of a descriptor by each call that makes one."""
    listener = socket.create_server(("127.0.0.1", 0))
    fd = listener.fileno()
    yield {}
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    two = (ctypes.c_int * 2)()
    calls: dict[int, tuple[object, ...]] = {
        SYS_ACCEPT: (fd, None, None),
        SYS_ACCEPT4: (fd, None, None, 0),
        SYS_SOCKET: (2, 1, 0),
        SYS_OPENAT: (-100, b"/", 0),
        SYS_PIPE2: (two, 0),
        SYS_EVENTFD2: (0, 0),
        SYS_EPOLL_CREATE1: (0,),
    }
    failed = dict.fromkeys(calls, 0)
    for _ in range(int(count)):
        for nr, arguments in calls.items():
            failed[nr] += _libc.syscall(nr, *arguments) == -1
    for fd in taken:
        os.close(fd)
    yield {"failed": [[nr, n] for nr, n in failed.items()]}


def waiting_reads(threads: str) -> Work:
    """Have so many threads wait in a read of a pipe each at the same time, then read once more without waiting."""
    pipes = [os.pipe() for _ in range(int(threads))]
    tids: list[int] = [0] * len(pipes)

    def read(i: int) -> None:
        tids[i] = threading.get_native_id()
        os.read(pipes[i][0], 1)
        os.read(pipes[i][0], 1)

    workers = [threading.Thread(target=read, args=(i,)) for i in range(len(pipes))]
    yield {}
    for worker in workers:
        worker.start()
    while not all(tids):
        time.sleep(0.001)
    for tid, (reader, _) in zip(tids, pipes, strict=True):
        wait_blocked(tid, SYS_READ, reader)
    for _, writer in pipes:
        os.write(writer, b"xy")
    for worker in workers:
        worker.join()
    yield {}
