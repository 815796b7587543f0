"""Looks for threads that have been blocked or have stalled for long, every so often, from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

#: Between two looks. A block is told at the second look after ``waits.min_ns``: after 0.1 to 0.3 s.
EVERY_S = 0.1
#: Processes looked at, of a service with more: each costs 20 us and 0.3 us per thread.
MAX_PROCESSES = 32


class WaitWatch:
    """Walks over the processes given last, while there are any; a thread of the collector's, asleep otherwise."""

    def __init__(self, walk: Callable[[Iterable[int]], None], every_s: float = EVERY_S) -> None:
        """*walk* is called with process ids, in the thread."""
        self._walk, self._every_s = walk, every_s
        self._tgids: tuple[int, ...] = ()
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="whyspan-waits", daemon=True)
        self._thread.start()

    def look_at(self, tgids: Iterable[int]) -> None:
        """Look at these processes from now on; at none: sleep."""
        self._tgids = tuple(tgids)[:MAX_PROCESSES]
        if self._tgids:
            self._wanted.set()
        else:
            self._wanted.clear()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._stop.wait(self._every_s):
                return
            self._walk(self._tgids)
