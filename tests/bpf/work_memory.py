"""Workloads that run out of memory in a cgroup of their own. See ``workloads``."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

from tests.bpf.work_sched import Work


def fills_cache(folder: str, file_mib: str, rounds: str) -> Work:
    """Write a file several times the size of the limit: the page cache of each part has to make room for the next."""
    block = os.urandom(1 << 20)
    fd = os.open(Path(folder) / "cache", os.O_CREAT | os.O_RDWR)
    yield {"tid": threading.get_native_id()}
    begin_ns = time.monotonic_ns()
    for _ in range(int(rounds)):
        for at in range(int(file_mib)):
            os.pwrite(fd, block, at << 20)
        os.fsync(fd)
    yield {"begin_ns": begin_ns, "end_ns": time.monotonic_ns()}


def touches(mib: str) -> Work:
    """Touch fresh memory beyond every limit: the OOM killer comes."""
    yield {}
    memory = mmap.mmap(-1, int(mib) << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    yield {}
