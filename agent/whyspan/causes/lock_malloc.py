"""``lock.malloc``: the thread waited for a lock of the memory allocator."""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.held import HeldRule, worth
from whyspan.causes.lock_owners import ALLOCATOR, owner
from whyspan.critical_path import Via
from whyspan.locks import MALLOC, MUTEX


class _LockMalloc(HeldRule):
    id = "lock.malloc"
    title = "waiting for the memory allocator's lock"
    neighbours = ("lock.contention", "memory.mmap_faults", "memory.reclaim")
    fix = "Try more arenas (unset MALLOC_ARENA_MAX), another allocator (jemalloc, tcmalloc), or fewer allocations."
    rank = 23
    nothing = "no wait for an allocator's lock"

    def takes(self, via: Via, ctx: Context) -> bool:
        """Take waits at glibc's arenas, and those of code of another allocator."""
        own = via.kind == MALLOC or (via.kind == MUTEX and owner(via.library) == ALLOCATOR)
        return own and worth(via, ctx)


RULE = _LockMalloc()
