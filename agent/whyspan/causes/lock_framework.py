"""``lock.framework``: the thread waited for a mutex of a serving framework or of a library of its."""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.held import HeldRule, worth
from whyspan.causes.lock_owners import LIBRARY, owner
from whyspan.critical_path import Via
from whyspan.locks import MUTEX


class _LockFramework(HeldRule):
    id = "lock.framework"
    title = "waiting for a mutex inside a library"
    neighbours = ("lock.contention", "lock.malloc", "cpu.oversubscribed")
    fix = "Try fewer threads that call that library at once, or a session, pool or arena of its own for each."
    rank = 24
    nothing = "no wait for a mutex that a known framework or a Python package's library took"

    def takes(self, via: Via, ctx: Context) -> bool:
        """Take mutexes of libraries that are no allocator's and no metrics library's."""
        return via.kind == MUTEX and owner(via.library) == LIBRARY and worth(via, ctx)


RULE = _LockFramework()
