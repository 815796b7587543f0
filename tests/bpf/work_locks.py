"""Workloads of locks: the interpreter's, the allocator's, a mutex, the map of memory. See ``workloads``."""

from __future__ import annotations

import ctypes
import threading

from tests.bpf.work_sched import Work


def gil_waits(library: str, rounds: str) -> Work:
    """A sibling has the interpreter lock for 60 ms, *rounds* times, in native code; the main thread wants it."""
    hog = ctypes.PyDLL(library)
    tids: list[int] = []
    begin, begun = threading.Semaphore(0), threading.Event()

    def keep() -> None:
        tids.append(threading.get_native_id())
        begun.set()
        for _ in range(int(rounds)):
            begin.acquire()
            hog.locks_spin(ctypes.c_double(0.06))

    thread = threading.Thread(target=keep)
    thread.start()
    begun.wait()
    yield {"main": threading.get_native_id(), "holder": tids[0]}
    rest = ctypes.CDLL(library)
    for _ in range(int(rounds)):
        begin.release()
        rest.locks_rest(ctypes.c_double(0.02))  # lets the lock go: then the hog has it
    thread.join()
    yield {}


def mutex_waits(library: str, rounds: str) -> Work:
    """A sibling has a mutex for 20 ms, *rounds* times; the main thread waits for it each time."""
    native = ctypes.CDLL(library)
    native.locks_address.restype = ctypes.c_void_p
    tids: list[int] = []
    begin, begun = threading.Semaphore(0), threading.Event()

    def keep() -> None:
        tids.append(threading.get_native_id())
        begun.set()
        for _ in range(int(rounds)):
            begin.acquire()
            native.locks_hold(ctypes.c_double(0.02))

    thread = threading.Thread(target=keep)
    thread.start()
    begun.wait()
    yield {
        "main": threading.get_native_id(),
        "holder": tids[0],
        "address": native.locks_address(),
    }
    for _ in range(int(rounds)):
        begin.release()
        native.locks_wait_held()
        native.locks_take()
    thread.join()
    yield {}


def malloc_waits(library: str, rounds: str) -> Work:
    """A sibling trims the heap, one arena for all; the main thread allocates until it has had to wait so often."""
    native = ctypes.CDLL(library)
    native.locks_take.restype = native.locks_allocate.restype = ctypes.c_double
    native.locks_litter(20_000)
    stop = threading.Event()
    tids: list[int] = []

    def trim() -> None:
        tids.append(threading.get_native_id())
        while not stop.is_set():
            native.locks_trim(ctypes.c_double(0.03))

    thread = threading.Thread(target=trim)
    thread.start()
    while not tids:
        pass
    yield {"main": threading.get_native_id(), "holder": tids[0]}
    waited = 0
    while waited < int(rounds):
        waited += native.locks_allocate(1) > 0.004
    stop.set()
    thread.join()
    yield {}
