"""Workloads of descriptors: pipes, eventfds, sockets, files; what they do is counted. See ``workloads``."""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time

from tests.bpf.work_sched import Work, wait_blocked

PAGE = mmap.PAGESIZE


def edges(kind: str, count: str) -> Work:
    """Write and read *count* times in turn, after one write that fails; ``kind`` is eventfd or pipe."""
    if kind == "eventfd":
        writer = reader = os.eventfd(0, os.EFD_NONBLOCK)
    else:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
    yield {"reader": reader, "writer": writer}
    datum = (1).to_bytes(8, "little")
    failed = 0
    if kind == "eventfd":
        os.write(writer, (2**64 - 2).to_bytes(8, "little"))  # full
        try:
            os.write(writer, datum)
        except BlockingIOError:
            failed += 1
        os.read(reader, 8)
    else:
        filled = 0
        while True:
            try:
                filled += os.write(writer, bytes(65536))
            except BlockingIOError:
                failed += 1
                break
        while filled:
            filled -= len(os.read(reader, 65536))
    begin_ns = time.monotonic_ns()
    spans = []
    for i in range(int(count)):
        before_ns = time.monotonic_ns()
        if i % 2 and kind == "pipe":
            os.writev(writer, [datum[:3], datum[3:]])
        else:
            os.write(writer, datum)
        between_ns = time.monotonic_ns()
        if i % 3 == 2:
            os.readv(reader, [bytearray(8)])
        else:
            os.read(reader, 8)
        spans.append((before_ns, between_ns, time.monotonic_ns()))
    yield {"failed": failed, "begin_ns": begin_ns, "spans": spans}


def numbered_writes(*counts: str) -> Work:
    """Write an eventfd as many times as the first count says, then the second, and so on."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    datum = (1).to_bytes(8, "little")
    yield {"fd": fd}
    for count in counts:
        for _ in range(int(count)):
            os.write(fd, datum)
        yield {}


def odd_and_even_writes(path: str, count: str) -> Work:
    """Write 0, 1, 2, ... bytes at a position."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    yield {"fd": fd}
    for size in range(int(count)):
        os.pwrite(fd, bytes(size), 0)
    yield {}


def blocked_pipe() -> Work:
    """Block writing a full pipe, then reading an empty one; another thread frees each."""
    reader, writer = os.pipe()
    empty_reader, empty_writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(65536))
    except BlockingIOError:
        os.set_blocking(writer, True)
    main = threading.get_native_id()

    def free() -> None:
        wait_blocked(main, 1, writer)
        os.read(reader, 1 << 20)
        wait_blocked(main, 0, empty_reader)
        os.write(empty_writer, b"x")

    thread = threading.Thread(target=free)
    yield {
        "writer": writer,
        "reader": empty_reader,
        "written_inode": os.fstat(writer).st_ino,
        "read_inode": os.fstat(empty_reader).st_ino,
    }
    thread.start()
    os.write(writer, b"x")
    os.read(empty_reader, 1)
    thread.join()
    yield {}


def blocked_socket() -> Work:
    """Block in recv on TCP, in recv on a unix socket, and in poll on the TCP socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    left, right = socket.socketpair()
    main = threading.get_native_id()

    def feed() -> None:
        wait_blocked(main, 45, near.fileno())
        far.send(b"1")
        wait_blocked(main, 45, left.fileno())
        right.send(b"2")
        wait_blocked(main, 7)
        far.send(b"3")

    thread = threading.Thread(target=feed)
    yield {
        "tcp": near.fileno(),
        "unix": left.fileno(),
        "lport": near.getsockname()[1],
        "rport": listener.getsockname()[1],
        "unix_inode": os.fstat(left.fileno()).st_ino,
    }
    thread.start()
    near.recv(1)
    left.recv(1)
    poll = select.poll()
    poll.register(near, select.POLLIN)
    poll.poll(10_000)
    near.recv(1)
    thread.join()
    yield {}


def fsyncs(path: str, count: str) -> Work:
    """Write a block to a file and fsync it, *count* times."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    yield {"fd": fd, "inode": os.fstat(fd).st_ino, "dev": os.fstat(fd).st_dev}
    for i in range(int(count)):
        os.pwrite(fd, os.urandom(PAGE), i * PAGE)
        os.fsync(fd)
    yield {}


def direct_writes(path: str, count: str) -> Work:
    """Overwrite blocks of a file past the page cache, one request each."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, bytes(int(count) * PAGE))
    os.fsync(fd)
    os.close(fd)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    block = mmap.mmap(-1, PAGE)
    yield {}
    begin_ns = time.monotonic_ns()
    for i in range(int(count)):
        os.pwrite(fd, block, i * PAGE)
    yield {"begin_ns": begin_ns, "end_ns": time.monotonic_ns()}


def unix_stream(rounds: str, pairs: str) -> Work:
    """Send through fresh socket pairs, in both directions, in pieces that differ between the ends."""
    yield {}
    sent = 0
    for _ in range(int(pairs)):
        left, right = socket.socketpair()
        for i in range(int(rounds)):
            left.send(bytes(i + 1))
            right.recv(i + 1)
            right.send(bytes(7))
            left.recv(3)
            left.recv(4)
            sent += i + 1
        left.close()
        right.close()
    yield {"sent": sent}


def tcp_stream(rounds: str) -> Work:
    """Both ends of a loopback connection in one process."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    yield {"near": near.getsockname()[1], "far": listener.getsockname()[1]}
    for i in range(int(rounds)):
        near.send(bytes(i + 1))
        got = 0
        while got < i + 1:
            got += len(far.recv(min(5, i + 1 - got)))
        far.send(bytes(11))
        near.recv(11, socket.MSG_WAITALL)
    yield {}
