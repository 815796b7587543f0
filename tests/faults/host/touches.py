"""Memory that a server touches for every request, a page at a time and without the interpreter's lock."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping
from typing import Any, Final

from tests.faults.host.fault import Inside

PAGE: Final = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_MADV_NOHUGEPAGE: Final = 15  # include/uapi/asm-generic/mman-common.h
_STRIDE: Final = 64  # pages: no read-ahead reaches the next one


class Memory:
    """A mapping of a file, never to be found in memory, or private memory, written to once."""

    def __init__(self, path: str = "", size: int = 0) -> None:
        self._fd = os.open(path, os.O_RDONLY) if path else -1
        self.size = os.fstat(self._fd).st_size if path else size
        protection = mmap.PROT_READ if path else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED if path else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = _libc.mmap(None, self.size, protection, flags, self._fd, 0)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        _libc.madvise(self.address, self.size, mmap.MADV_RANDOM if path else _MADV_NOHUGEPAGE)
        self._at = 0
        self._lock = threading.Lock()
        if path:
            self._drop()
        else:
            ctypes.memset(self.address, 1, self.size)

    def _drop(self) -> None:
        _libc.madvise(self.address, self.size, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _next(self) -> int:
        with self._lock:
            pages = self.size // PAGE
            at = self._at * _STRIDE
            page = (at % pages + at // pages) % pages
            self._at += 1
            if self._fd >= 0 and self._at % pages == 0:
                self._drop()
            return page

    def touch(self, count: int) -> None:
        """Read so many pages, each of them another one."""
        byte = ctypes.create_string_buffer(1)
        for _ in range(count):
            _libc.memcpy(byte, self.address + self._next() * PAGE, 1)

    def close(self) -> None:
        """Unmap it."""
        _libc.munmap(self.address, self.size)
        if self._fd >= 0:
            os.close(self._fd)


class Touches(Inside):
    """Touches pages before every request: on the event loop if ``loop`` is set, else on the worker."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._count, self._loop = 0, False

    def start(self, settings: Mapping[str, Any]) -> None:
        self._count, self._loop = int(settings["count"]), bool(settings["loop"])
        self._memory = Memory(str(settings.get("path", "")), int(settings.get("bytes", 0)))

    def stop(self) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.close()

    async def on_loop(self) -> None:
        if self._loop:
            self._touch()

    def on_worker(self) -> None:
        if not self._loop:
            self._touch()

    def _touch(self) -> None:
        memory = self._memory
        if memory is not None:
            memory.touch(self._count)
