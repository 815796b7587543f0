"""Workloads of storage: page faults on a file, on swap, and dirty data; what they do is counted. See ``workloads``."""

from __future__ import annotations

import mmap
import os
import socket

from tests.bpf.work_sched import Work
from tests.faults.host.loopdisk import major_faults
from tests.faults.host.touches import Memory


def file_faults(path: str, count: str, *options: str) -> Work:
    """Touch *count* pages of a file that are not in memory, the file deleted before if ``deleted`` is an option."""
    memory = Memory(path)
    info = os.stat(path)
    if "deleted" in options:
        os.unlink(path)
    yield {"inode": info.st_ino, "dev": info.st_dev}
    before = major_faults(os.getpid())
    memory.touch(int(count))
    yield {"majors": major_faults(os.getpid()) - before}


def send_faults(path: str, count: str) -> Work:
    """Send *count* pages of a file that are not in memory, each by one call that copies it from the mapping."""
    fd = os.open(path, os.O_RDONLY)
    pages = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    left, right = socket.socketpair()
    yield {"inode": os.fstat(fd).st_ino}
    before = major_faults(os.getpid())
    with memoryview(pages) as view:
        for i in range(int(count)):
            left.send(view[i << 18 : (i << 18) + 64])
            right.recv(64)
    yield {"majors": major_faults(os.getpid()) - before}


def plain_reads(path: str, count: str) -> Work:
    """Read *count* blocks of a file that are not in memory by read(2)."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    yield {}
    for i in range(int(count)):
        os.pread(fd, 64, i << 18)
    yield {}


def swap_faults(megabytes: str, count: str) -> Work:
    """Touch *count* pages of memory that has been swapped out meanwhile."""
    memory = Memory(size=int(megabytes) << 20)
    yield {}
    before = major_faults(os.getpid())
    memory.touch(int(count))
    yield {"majors": major_faults(os.getpid()) - before}


def many_mappings(folder: str, count: str, last: str) -> Work:
    """Map *count* files, and a last one, of which one page is touched."""
    kept = []
    for i in range(int(count)):
        fd = os.open(f"{folder}/{i}", os.O_CREAT | os.O_RDWR)
        os.ftruncate(fd, mmap.PAGESIZE)
        kept.append(mmap.mmap(fd, mmap.PAGESIZE))
        os.close(fd)
    memory = Memory(last)
    yield {"inode": os.stat(last).st_ino}
    memory.touch(1)
    yield {"mapped": len(kept)}


def dirties(path: str, megabytes: str) -> Work:
    """Write a file and leave it dirty; stays there, with the file open."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    yield {"inode": os.fstat(fd).st_ino}
    for i in range(int(megabytes)):
        os.pwrite(fd, os.urandom(1 << 20), i << 20)
    yield {}
    os.close(fd)
    yield {}
