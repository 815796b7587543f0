"""Workloads with known counts, run as children: ``python -m tests.bpf.workloads NAME ARGUMENTS``.

Each is a generator: it sets up and yields facts, waits there for a line on standard input, works, and yields
its result. It ends when its input does.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tests.bpf.scripted import scripted_server

Work = Generator[Any, Any, None]

SYS_FUTEX = 202  # x86-64
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)


def blocked_in(tid: int, nr: int, first: int | None = None) -> bool:
    """Whether a thread of this process is blocked in a system call (with this first argument)."""
    parts = Path(f"/proc/self/task/{tid}/syscall").read_text().split()
    return parts[0] == str(nr) and (first is None or int(parts[1], 16) == first)


def wait_blocked(tid: int, nr: int, first: int | None = None) -> None:
    """Wait until it is.

    Raises:
        TimeoutError: it was not within 10 s.
    """
    end_s = time.monotonic() + 10
    while not blocked_in(tid, nr, first):
        if time.monotonic() > end_s:
            raise TimeoutError(f"thread {tid} does not block in call {nr}")
        time.sleep(0.001)


def sleeps(count: str, ms: str = "2") -> Work:
    yield {}
    for _ in range(int(count)):
        time.sleep(float(ms) / 1000)
    yield {}


def futex(rounds: str) -> Work:
    """The main thread wakes another out of a futex that nothing else uses."""
    word = ctypes.c_uint32(0)
    address, tids = ctypes.addressof(word), []

    def wait() -> None:
        tids.append(threading.get_native_id())
        for _ in range(int(rounds)):
            go.acquire()
            _libc.syscall(SYS_FUTEX, ctypes.c_void_p(address), FUTEX_WAIT_PRIVATE, 0, None)
            done.release()

    go, done = threading.Semaphore(0), threading.Semaphore(0)
    thread = threading.Thread(target=wait)
    thread.start()
    while not tids:
        time.sleep(0.001)
    yield {"waiter": tids[0], "waker": threading.get_native_id(), "address": address}
    for _ in range(int(rounds)):
        go.release()
        wait_blocked(tids[0], SYS_FUTEX, address)
        _libc.syscall(SYS_FUTEX, ctypes.c_void_p(address), FUTEX_WAKE_PRIVATE, 1)
        done.acquire()
    thread.join()
    yield {}


def burn(seconds: str, threads: str = "1", name: str = "") -> Work:
    """Keep *threads* threads busy, each in one C call that holds no GIL."""
    if name:
        _libc.prctl(15, name.encode()[:15], 0, 0, 0)
    end_s = 0.0
    buffer = ctypes.create_string_buffer(1 << 20)

    def work() -> None:
        while time.monotonic() < end_s:
            ctypes.memset(buffer, 0, len(buffer))

    yield {}
    end_s = time.monotonic() + float(seconds)
    others = [threading.Thread(target=work) for _ in range(int(threads) - 1)]
    for t in others:
        t.start()
    work()
    for t in others:
        t.join()
    yield {"cpu_s": time.process_time()}


def faults(path: str, pages: str) -> Work:
    """Touch pages of a mapped file that are not in memory."""
    fd = os.open(path, os.O_RDWR)
    size = os.fstat(fd).st_size
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    area = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    area.madvise(mmap.MADV_RANDOM)
    yield {}
    stride = size // PAGE // int(pages) * PAGE
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    for i in range(int(pages)):
        area[i * stride]
    yield {"major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before}


def threads_then_exit(count: str) -> Work:
    """Start threads that sleep, so that they all die with the process."""
    yield {}
    threading.stack_size(64 << 10)
    tids: list[int] = []

    def body() -> None:
        tids.append(threading.get_native_id())
        time.sleep(3600)

    started = 0
    try:
        for _ in range(int(count)):
            threading.Thread(target=body, daemon=True).start()
            started += 1
    except RuntimeError:  # the machine allows no more
        pass
    while len(tids) < started:
        time.sleep(0.01)
    yield {"tids": tids}


def programs(count: str, status: str) -> Work:
    """Run a shell that exits with *status*, *count* times, one after another."""
    yield {}
    pids = []
    for _ in range(int(count)):
        pids.append(os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {status}"], {}))
        os.waitpid(pids[-1], 0)
    yield {"pids": pids}


def forks(count: str) -> Work:
    """Fork children that exit at once, up to 16 at a time."""
    yield {}
    alive = 0
    for _ in range(int(count)):
        if os.fork() == 0:
            os._exit(0)
        alive += 1
        if alive == 16:
            os.waitpid(-1, 0)
            alive -= 1
    while alive:
        os.waitpid(-1, 0)
        alive -= 1
    yield {}


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
    import select

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


WORKLOADS: dict[str, Callable[..., Work]] = {
    f.__name__: f
    for f in (
        sleeps,
        futex,
        burn,
        faults,
        threads_then_exit,
        programs,
        forks,
        edges,
        numbered_writes,
        odd_and_even_writes,
        blocked_pipe,
        blocked_socket,
        fsyncs,
        direct_writes,
        unix_stream,
        tcp_stream,
        scripted_server,
    )
}


def main() -> None:
    """Say each thing that the workload yields; wait for a line before each further step."""
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    work = WORKLOADS[sys.argv[1]](*sys.argv[2:])
    said = next(work)
    while True:
        os.write(1, json.dumps(said).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(0)  # not waiting for threads: they are part of what is tested
            line += data
        try:
            said = work.send(json.loads(line))
        except StopIteration:
            return


if __name__ == "__main__":
    main()
