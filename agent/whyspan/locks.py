"""Which lock a sleeping thread waited for, since when, and who had it meanwhile."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from whyspan.model import LockFact
from whyspan.threads import Timelines
from whyspan.timeline import HRTIMER, NO_WAKE, RUNNABLE, RUNNING, SOFTIRQ, TASK, ThreadTimeline, Wait

#: Kinds of locks: of an interpreter, of an allocator, any other mutex, and of a process's memory in the kernel.
GIL: Final = "gil"
MALLOC: Final = "malloc"
MUTEX: Final = "mutex"
MMAP_LOCK: Final = "mmap_lock"

# linux/futex.h. glibc's low-level lock waits plainly for the value 2; condition variables, semaphores and barriers of
# threads wait with a bitset: those hand something over and are no locks.
_FUTEX_WAIT: Final = 0
_FUTEX_LOCK_PI: Final = 6
_MUTEX_CONTENDED: Final = 2
_OPERATION: Final = 0xFF
_FUTEX_CALLS: Final = (202, 219)  # and restart_syscall. Source: arch/x86/entry/syscalls/syscall_64.tbl
_UNINTERRUPTIBLE: Final = 2
# glibc: HEAP_MAX_SIZE, and where the arena lies behind the head of its heap since and before 2.35. malloc/arena.c
_HEAP_BYTES: Final = 64 << 20
_ARENA_OFFSETS: Final = (0x30, 0x20)

_NEAR_NS: Final = 50_000  # between a switch and the record of its futex, which two programs stamp
# On a CPU between the begin of contention, or a wake-up in vain, and the sleep; how many events since that begin are
# looked at, and how many wake-ups in vain.
_MMAP_NEAR_NS: Final = 200_000
_MMAP_EVENTS: Final = 64
_MAX_LOST: Final = 8
# Between two waits of one thread at one lock that count as one: what a retry after a time-out, or a lost race, takes.
_GIL_GAP_NS: Final = 200_000
_GAP_NS: Final = 20_000
_MAX_SIBLINGS: Final = 64
_OPENMP: Final = ("libgomp", "libomp", "libiomp")


class Where(NamedTuple):
    """What a futex is: its kind (empty when it is no lock), and the code that waits for it."""

    kind: str
    address: int
    library: str  # path of the file that waits, libc's callers where they are known; empty when not
    owner: int = 0  # thread that a mutex names; a claim of the process


class LockWait(NamedTuple):
    """One wait for a lock. ``holder_tid`` had it at the end, 0 when that is not known."""

    kind: str
    address: int
    start_ns: int
    end_ns: int
    holder_tid: int
    holder_tgid: int
    library: str = ""
    guessed: bool = False


class _Rows(NamedTuple):
    ts: list[int]
    rows: list[tuple[int, ...]]  # uaddr, ip, val, owner, aux, words


class _Sleeps:
    """What was found of one thread's sleeps at futexes, by position in its timeline; ``where`` by time and process."""

    __slots__ = ("busiest", "found", "rows", "runs", "thread", "where")

    def __init__(self, thread: ThreadTimeline, rows: _Rows) -> None:
        self.thread = thread
        self.rows = rows
        self.where: dict[tuple[int, int], Where | None] = {}
        self.runs: dict[int, tuple[int, int]] = {}  # of every member: the first and the last of its run
        self.busiest: dict[int, int] = {}  # by the first of a run
        self.found: dict[int, LockWait | None] = {}


class Locks:
    """Tells waits for locks from other waits. Memoises: a wait of many sleeps is asked about at each of them."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        types = timelines.schema.types
        self._seen = "futex_wait" in types
        self._mmap_seen = "mmap_lock_wait" in types
        self._sleeps: dict[int, _Sleeps] = {}
        self._siblings: dict[int, list[int]] = {}
        self._mmap: dict[tuple[int, int], tuple[list[int], list[tuple[int, int, int]]]] = {}
        self._known: dict[tuple[int, ...], str] = {}

    def find(self, tid: int, thread: ThreadTimeline, at: int, wait: Wait) -> LockWait | None:
        """Return the wait for a lock that a blocked interval is (part of), or None. *at* is where it began."""
        if at < 0:
            return None
        if self._mmap_seen and wait.prev_state & _UNINTERRUPTIBLE:
            return self._mmap_wait(tid, thread, at, wait)
        if not self._seen or wait.syscall_nr not in _FUTEX_CALLS:
            return None
        sleeps = self._of(tid, thread)
        if at not in sleeps.found:
            sleeps.found[at] = self._find(tid, sleeps, at)
        return sleeps.found[at]

    def _find(self, tid: int, sleeps: _Sleeps, at: int) -> LockWait | None:
        thread = sleeps.thread
        where = self._where(sleeps, at)
        if where is None or not where.kind:
            return None
        first, last = self._joined(sleeps, at, where)
        ended = thread.wait(last)
        holder = self._holder(tid, sleeps, where, first, ended)
        facts = self._timelines.facts.locks(thread.tgid)
        address = facts.gil_start if where.kind == GIL and facts is not None else where.address
        start = thread.ts[first]
        return LockWait(where.kind, address, start, ended.end_ns, *holder[:2], where.library, holder[2])

    def waits(self, tid: int, thread: ThreadTimeline, at: int) -> bool:
        """Return whether a blocked interval that began at event *at* is (part of) a wait for a lock."""
        if at < 0 or not (self._seen or self._mmap_seen):
            return False
        wait = thread.wait(at)
        if self._mmap_seen and wait.prev_state & _UNINTERRUPTIBLE:
            return self._mmap_wait(tid, thread, at, wait) is not None
        where = self._where(self._of(tid, thread), at) if wait.syscall_nr in _FUTEX_CALLS else None
        return where is not None and where.kind != ""

    def where(self, tid: int, tgid: int, t: int) -> Where | None:
        """Return what the futex is that a thread went to sleep on at *t*; None when that was not seen."""
        return self._at(self._of(tid, self._timelines.thread(tid)), tgid, t)

    def _where(self, sleeps: _Sleeps, at: int) -> Where | None:
        return self._at(sleeps, sleeps.thread.tgid, sleeps.thread.ts[at])

    def _at(self, sleeps: _Sleeps, tgid: int, t: int) -> Where | None:
        key = t, tgid
        if key not in sleeps.where:
            sleeps.where[key] = self._look(sleeps.rows, tgid, t)
        return sleeps.where[key]

    def _look(self, rows: _Rows, tgid: int, t: int) -> Where | None:
        i = bisect_left(rows.ts, t - _NEAR_NS)
        near = [k for k in range(i, min(i + 4, len(rows.ts))) if rows.ts[k] <= t + _NEAR_NS]
        if not near:
            return None
        uaddr, ip, val, owner, aux, *words = rows.rows[min(near, key=lambda k: abs(rows.ts[k] - t))]
        facts = self._timelines.facts.locks(tgid)
        kind = _kind(facts, uaddr, ip, val, aux & _OPERATION)
        return Where(kind, uaddr, self._library(facts, tgid, ip, words), owner)

    def contended(self, address: int) -> tuple[int, int]:
        """Return (distinct threads, sleeps) of the window that waited at a futex's address or an mmap_lock's key."""
        threads: set[int] = set()
        sleeps = 0
        for name, field in (("futex_wait", "uaddr"), ("mmap_lock_wait", "key")):
            rows = self._timelines.keyed(name, field, address) if name in self._timelines.schema.types else ()
            if len(rows):
                threads.update(rows["tid"].tolist())  # type: ignore[call-overload]
                sleeps += len(rows)
        return len(threads), sleeps

    def library_of(self, tgid: int, ip: int) -> str:
        """Return the path of the file that an address of code lies in; empty when not known."""
        return _file(self._timelines.facts.locks(tgid), ip)

    def _library(self, facts: LockFact | None, tgid: int, ip: int, words: list[int]) -> str:
        key = tgid, ip, *words
        found = self._known.get(key)
        if found is None:
            own = _file(facts, ip)
            callers = [f for f in (_file(facts, w) for w in words if w) if f and f != own]
            found = self._known[key] = callers[0] if callers else own
        return found

    def _of(self, tid: int, thread: ThreadTimeline) -> _Sleeps:
        found = self._sleeps.get(tid)
        if found is None or found.thread is not thread:  # read again, further back
            found = self._sleeps[tid] = _Sleeps(thread, self._read(tid))
        return found

    def _read(self, tid: int) -> _Rows:
        rows = self._timelines.rows_of(tid, "futex_wait")
        if not len(rows):
            return _Rows([], [])
        words: dict[int, tuple[int, ...]] = {}
        more = self._timelines.rows_of(tid, "futex_from")
        if len(more):
            names = ("ts_ns", "word0", "word1", "word2", "word3")
            words = {t: w for t, *w in zip(*(more[n].tolist() for n in names), strict=True)}  # type: ignore[misc]
        fields = [rows[n].tolist() for n in ("uaddr", "ip", "val", "owner", "aux")]
        ts: list[int] = rows["ts_ns"].tolist()
        return _Rows(
            ts, [(*row, *words.get(t, ())) for t, row in zip(ts, zip(*fields, strict=True), strict=True)]
        )

    def _joined(self, sleeps: _Sleeps, at: int, where: Where) -> tuple[int, int]:
        """Return the first and last position of the waits that are one: retries of a timed wait, lost races."""
        found = sleeps.runs.get(at)
        if found is not None:
            return found
        thread = sleeps.thread
        run = [at]
        before = thread.block_before(at)
        while before >= 0 and self._same(sleeps, before, run[-1], where):
            run.append(before)
            before = thread.block_before(before)
        first, last = run[-1], at
        after = thread.block_after(at)
        while after >= 0 and self._same(sleeps, last, after, where):
            run.append(after)
            last = after
            after = thread.block_after(after)
        # To belong together is mutual: one answer for all of them, so that each is looked at once.
        found = first, last
        sleeps.runs.update(dict.fromkeys(run, found))
        return found

    def _same(self, sleeps: _Sleeps, one: int, other: int, where: Where) -> bool:
        thread = sleeps.thread
        awake = thread.in_after(one)
        if awake is None or thread.ts[other] - awake > (_GIL_GAP_NS if where.kind == GIL else _GAP_NS):
            return False
        earlier, later = self._where(sleeps, one), self._where(sleeps, other)
        if earlier is None or later is None or not earlier.kind == later.kind == where.kind:
            return False
        # The interpreter's lock is a structure: a condition variable, another one, and their mutexes.
        if where.kind != GIL:
            return earlier.address == later.address == where.address
        # Whoever was told that it is free may have had it for a moment; one whose time was up had not.
        return thread.context(one) != TASK or earlier.address != later.address

    def _holder(
        self, tid: int, sleeps: _Sleeps, where: Where, first: int, wait: Wait
    ) -> tuple[int, int, bool]:
        waker, thread = wait.waker_tid, sleeps.thread
        if wait.context == TASK and waker not in (0, tid) and self._timelines.watched(waker):
            return waker, wait.waker_tgid, False
        if where.kind == GIL and wait.context in (HRTIMER, SOFTIRQ, NO_WAKE):
            # Its time was up just when the lock was free: it was never told by whom.
            if first not in sleeps.busiest:
                sleeps.busiest[first] = self._busiest(tid, thread.tgid, thread.ts[first], wait.end_ns)
            busy = sleeps.busiest[first]
            return (busy, thread.tgid, True) if busy else (0, 0, False)
        owner = where.owner
        if where.kind == MUTEX and wait.context == NO_WAKE and owner not in (0, tid):
            members = self._timelines.members()
            if members.get(owner) == thread.tgid:
                return owner, thread.tgid, True
        return 0, 0, False

    def _busiest(self, tid: int, tgid: int, start_ns: int, end_ns: int) -> int:
        """Return the sibling that was on a CPU at the end, else the one preempted for longest; 0 when there is none.

        One that was just woken wants the lock itself.
        """
        best, most = 0, (False, 0)
        members = self._siblings.get(tgid)
        if members is None:
            every = self._timelines.members().items()
            members = self._siblings[tgid] = [t for t, g in every if g == tgid]
        for other in islice((t for t in members if t != tid), _MAX_SIBLINGS):
            thread = self._timelines.thread(other)
            if thread.rests(end_ns):
                continue
            since, state, at, _ = thread.before(end_ns)
            long = state == RUNNING, end_ns - max(since, start_ns)
            if state in (RUNNING, RUNNABLE) and long > most and not self._retries(other, thread, at, end_ns):
                best, most = other, long
        return best

    def _retries(self, tid: int, thread: ThreadTimeline, at: int, t: int) -> bool:
        """Return whether a thread is awake at *t* only to ask for the interpreter lock again."""
        slept = thread.block_before(at + 1)
        if slept < 0 or t - (thread.in_after(slept) or t) > _GIL_GAP_NS:
            return False
        found = self._where(self._of(tid, thread), slept)
        return found is not None and found.kind == GIL and thread.context(slept) != TASK

    def _mmap_wait(self, tid: int, thread: ThreadTimeline, at: int, wait: Wait) -> LockWait | None:
        contention = self._contention(tid, thread, at, wait)
        if contention is None:
            return None
        owner, owner_tgid, key = contention
        holder = 0, 0, False
        if (
            wait.context == TASK
            and wait.waker_tid not in (0, tid)
            and self._timelines.watched(wait.waker_tid)
        ):
            holder = wait.waker_tid, wait.waker_tgid, False
        elif owner not in (0, tid) and self._timelines.watched(owner):
            holder = owner, owner_tgid, True
        return LockWait(MMAP_LOCK, key, wait.start_ns, wait.end_ns, holder[0], holder[1], "", holder[2])

    def _contention(
        self, tid: int, thread: ThreadTimeline, at: int, wait: Wait
    ) -> tuple[int, int, int] | None:
        """Return (owner, its process, key) of the lock that a sleep is for: contention began just before it, or before
        the sleep that it repeats: woken, the thread found that another one had been quicker.
        """
        ts, rows = self._mmap_rows(tid)
        for _ in range(_MAX_LOST):
            i = bisect_left(ts, wait.start_ns + 1) - 1
            if i < 0:
                return None
            if wait.start_ns - ts[i] <= _MMAP_NEAR_NS:
                return rows[i]
            if at - bisect_left(thread.ts, ts[i]) > _MMAP_EVENTS:
                return None
            before = thread.block_before(at)
            since = max(ts[i], thread.ts[before]) if before >= 0 else ts[i]
            # Preempted in between it did nothing; what it did itself is little.
            tiles = thread.intervals(since, wait.start_ns)
            if sum(end - start for start, end, how in tiles if how.state == RUNNING) > _MMAP_NEAR_NS:
                return None
            if since == ts[i]:
                return rows[i]
            again, wait, at = wait, thread.wait(before), before
            same = again.syscall_nr == wait.syscall_nr and bool(wait.prev_state & _UNINTERRUPTIBLE)
            # Whoever lets go of it wakes who waits; a disk would do so by an interrupt.
            if not same or again.context != TASK or again.waker_tgid != thread.tgid:
                return None
        return None

    def _mmap_rows(self, tid: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        rows = self._timelines.rows_of(tid, "mmap_lock_wait")
        memo = tid, len(rows)
        found = self._mmap.get(memo)
        if found is None:
            names = ("owner_tid", "owner_tgid", "key")
            found = (
                rows["ts_ns"].tolist() if len(rows) else [],
                list(zip(*(rows[n].tolist() for n in names), strict=True)) if len(rows) else [],
            )
            self._mmap[memo] = found
        return found

    def openmp(self, tid: int, tgid: int, wait: Wait) -> bool:
        """Return whether a wait is one of OpenMP's, at a barrier or for work: its code is in an OpenMP library."""
        if wait.syscall_nr not in _FUTEX_CALLS:
            return False
        where = self.where(tid, tgid, wait.start_ns)
        return where is not None and any(f"/{name}" in where.library for name in _OPENMP)


def _kind(facts: LockFact | None, uaddr: int, ip: int, val: int, operation: int) -> str:
    if facts is not None and facts.gil_start <= uaddr < facts.gil_end:
        return GIL
    if operation == _FUTEX_LOCK_PI:
        return MUTEX
    if operation != _FUTEX_WAIT or val != _MUTEX_CONTENDED:
        return ""
    if facts is None:
        return MUTEX
    if uaddr == facts.main_arena:
        return MALLOC
    own = _file(facts, ip)
    if any(f"/{name}" in own for name in _OPENMP):
        return ""  # its barriers wait plainly, for any value
    in_libc = "/libc.so" in own or "/libc-" in own
    if in_libc and uaddr % _HEAP_BYTES in _ARENA_OFFSETS:
        return MALLOC
    return MUTEX


def _file(facts: LockFact | None, address: int) -> str:
    if facts is None or not facts.text or not address:
        return ""
    i = bisect_right(facts.text, address, key=attrgetter("start")) - 1
    return facts.text[i].path if i >= 0 and address < facts.text[i].end else ""
