"""A process that loads a marker when it is told and marks as it is told. See ``workloads``."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.bpf.work_sched import Work

_FUNCTION, _SEMAPHORE = "whyspan_mark_v1", "whyspan_mark_v1_semaphore"


class _Marker:
    """The C interface of a marker's file, by ctypes: also where the file is a stand-in."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.function: Callable[..., None] | None = getattr(self.lib, _FUNCTION, None)

    def mark(self, kind: int, payload: bytes, length: int = -1) -> None:
        """Call the function, watched or not; *length* may be a lie."""
        assert self.function is not None
        self.function(
            ctypes.c_uint32(kind),
            ctypes.c_uint32(len(payload) if length < 0 else length),
            ctypes.c_char_p(payload),
        )

    def nowhere(self, kind: int, length: int) -> None:
        """Call it with an address that is none."""
        assert self.function is not None
        self.function(ctypes.c_uint32(kind), ctypes.c_uint32(length), ctypes.c_void_p(8))

    def watchers(self) -> int:
        try:
            return ctypes.c_ushort.in_dll(self.lib, _SEMAPHORE).value
        except ValueError:
            return -1


def marker() -> Work:
    """Each line is [what, arguments...]; the answer is what it did."""
    loaded: _Marker | None = None
    answer: Any = {"tid": threading.get_native_id()}
    while True:
        what, *rest = yield answer
        answer = {}
        if what == "load":
            loaded = _Marker(rest[0])
        elif what == "unload":
            assert loaded is not None
            handle, loaded = loaded.lib._handle, None
            answer = {"closed": ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))}
        elif what == "fork":
            answer = {"pid": _forked(loaded, *rest)}
        elif what == "exec":
            os.execvp(rest[0], rest)
        else:
            assert loaded is not None
            begin_ns = time.monotonic_ns()
            if what == "mark":
                kind, texts = rest
                for text in texts:
                    loaded.mark(kind, text.encode())
            elif what == "lie":
                loaded.mark(int(rest[0]), rest[1].encode(), int(rest[2]))
            elif what == "nowhere":
                loaded.nowhere(*rest)
            answer = {"watchers": loaded.watchers(), "begin_ns": begin_ns, "end_ns": time.monotonic_ns()}


def _forked(loaded: _Marker | None, kind: int, text: str) -> int:
    """Have a child mark once and end; return its number."""
    pid = os.fork()
    if not pid:
        if loaded is not None:
            loaded.mark(kind, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
