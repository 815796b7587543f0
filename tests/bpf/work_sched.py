"""Workloads of threads and processes: what they do is counted. See ``workloads``."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from tests.bpf.waiting import SLOW

Work = Generator[Any, Any, None]

SYS_FUTEX, SYS_USERFAULTFD = 202, 323  # x86-64
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04
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
        time.sleep(float(ms) / 1000 * SLOW)  # one that ends before the thread left the CPU is no block
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


def faults(count: str) -> Work:
    """Touch pages that another thread provides, each once the toucher is asleep in its fault."""
    size = int(count) * PAGE
    area = mmap.mmap(-1, size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    uffd = _libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
    if uffd < 0:
        yield {"error": os.strerror(ctypes.get_errno())}
        return
    fcntl.ioctl(uffd, UFFDIO_API, struct.pack("=QQQ", 0xAA, 0, 0))
    fcntl.ioctl(uffd, UFFDIO_REGISTER, struct.pack("=QQQQ", start, size, 1, 0))  # missing pages
    toucher = threading.get_native_id()

    def provide() -> None:
        for _ in range(int(count)):
            (address,) = struct.unpack_from("=Q", os.read(uffd, 32), 16)
            while Path(f"/proc/self/task/{toucher}/syscall").read_text().startswith("running"):
                time.sleep(0.001)
            fcntl.ioctl(uffd, UFFDIO_ZEROPAGE, struct.pack("=QQQq", address & -PAGE, PAGE, 0, 0))

    provider = threading.Thread(target=provide)
    provider.start()
    yield {"provider": provider.native_id}
    for i in range(int(count)):
        _libc.memset(ctypes.c_void_p(start + i * PAGE), 1, 1)  # without the GIL, which the provider needs
    provider.join()
    yield {}


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


def datagrams(count: str) -> Work:
    """Send datagrams to oneself that nobody reads: each is received on the spot, in a soft interrupt."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as by,
    ):
        to.bind(("127.0.0.1", 0))
        address = to.getsockname()
        yield {}
        for _ in range(int(count)):
            by.sendto(b"x" * 100, address)
        yield {}
