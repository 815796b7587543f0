"""Of the tests only: has every mark of a process written to a file, as if somebody watched.

``WHYSPAN_TEST_MARKS`` names a folder; each process appends to ``<pid>.jsonl`` one line a mark: time, thread, kind,
body. ``WHYSPAN_TEST_MARKS_IF`` names a file without which nobody watches.
"""

from __future__ import annotations

import os
import threading
import time
from typing import IO

_FOLDER = os.environ.get("WHYSPAN_TEST_MARKS")
_IF = os.environ.get("WHYSPAN_TEST_MARKS_IF")


def _sink(folder: str) -> None:
    from whyspan_inproc import emit

    files: dict[int, IO[bytes]] = {}

    def mark(kind: int, payload: bytes) -> None:
        now = time.monotonic_ns()
        pid = os.getpid()
        if pid not in files:
            path = os.path.join(folder, f"{pid}.jsonl")
            files[pid] = open(path, "ab", buffering=0)  # noqa: SIM115 (for the process's life)
        files[pid].write(b"[%d,%d,%d,%s]\n" % (now, threading.get_native_id(), kind, payload))

    emit._mark = mark
    emit._watchers = (lambda: int(os.path.exists(_IF))) if _IF else (lambda: 1)


if _FOLDER:
    _sink(_FOLDER)
