"""``lock.contention``: the thread waited for a mutex that another thread had, or for the lock of its memory's map."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.held import HeldRule, contention, lock_name
from whyspan.causes.lock_owners import owner
from whyspan.critical_path import Via
from whyspan.locks import GIL, MALLOC, MUTEX

#: A single wait of a single thread is contention when it is as long as this, any wait of several from a millisecond.
ALONE_NS: Final = 10_000_000
LONG_NS: Final = 1_000_000


class _LockContention(HeldRule):
    id = "lock.contention"
    title = "waiting for a lock that another thread had"
    neighbours = ("python.gil", "cpu.oversubscribed", "memory.mmap_faults")
    fix = (
        "Try holding that lock for shorter, splitting it, or keeping slow work (I/O, large loops) out of it."
    )
    rank = 26
    nothing = "no wait for a mutex or an mmap_lock with more than one waiter or wait"

    def takes(self, via: Via, ctx: Context) -> bool:
        """Take a lock with two waiting threads or more, or with repeated waits; else only a long wait."""
        if via.kind in (GIL, MALLOC) or (via.kind == MUTEX and owner(via.library)):
            return False
        threads, sleeps = contention(via, ctx)
        return via.ns >= ALONE_NS or ((threads >= 2 or sleeps >= 2) and via.ns >= LONG_NS) or sleeps >= 16

    def lock(self, via: Via, ctx: Context) -> str:
        """Return which lock it is, and how many waited there."""
        threads, sleeps = contention(via, ctx)
        return f"{lock_name(via)} ({sleeps} waits of {threads} threads)"


RULE = _LockContention()
