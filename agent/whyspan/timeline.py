"""One thread's scheduling history, decoded from its context switches and wake-ups as it is read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from whyspan_probes.schema import Events, Schema, take

RUNNING: Final = "running"
RUNNABLE: Final = "runnable"  # preempted, waiting for a CPU
WAKEUP: Final = "wakeup"  # woken, waiting for a CPU
THROTTLED: Final = "throttled"
BLOCKED: Final = "blocked"
UNKNOWN_STATE: Final = "unknown"

# Waker contexts.
TASK: Final = 0
HRTIMER: Final = 1
SOFTIRQ: Final = 2
HARDIRQ: Final = 3
NO_WAKE: Final = -1

# What begins at a scheduling event.
_IN, _OFF, _BLOCK, _WAKE = 0, 1, 2, 3

_PREEMPTED = 1
_THROTTLED = 2

# Events looked through for a thread's next rest: more between two rests is no mere retry.
_NEAR_EVENTS = 16

#: The start of an interval that began before the first event seen.
BEGINNING: Final = -1


class Interval(NamedTuple):
    """The state of a thread from ``start_ns``; ``at`` is the position of the event that began it."""

    start_ns: int
    state: str
    at: int
    inferred: bool = False


class FdBlock(NamedTuple):
    """The descriptor a thread blocked on; ``kind`` as in ``fd_block`` events (1 file ... 8 other)."""

    kind: int
    inode: int
    key: int
    fd: int
    dev: int


class Wait(NamedTuple):
    """One blocked interval and what ended it. ``end_ns`` is the wake-up, or the switch-in when it was lost.

    ``context`` is NO_WAKE when the wake-up was not seen; ``syscall_nr`` is -2 when it is not known.
    """

    start_ns: int
    end_ns: int
    syscall_nr: int
    arg0: int
    prev_state: int
    waker_tid: int
    waker_tgid: int
    context: int
    softirq_vec: int
    waker_nr: int
    fd: FdBlock | None


class Rival(NamedTuple):
    """Who had the CPU while a thread waited for it: as seen at its ends; ``whole_ns`` is the full wait."""

    tid: int
    tgid: int
    cpu: int
    start_ns: int
    whole_ns: int


class Layout:
    """Readers of the three scheduling events, bound to one schema."""

    def __init__(self, schema: Schema) -> None:
        self.kinds = [schema.kind(n) for n in ("sched_switch_out", "sched_switch_in", "sched_wake")]
        types = schema.types
        self.ready = all(k >= 0 for k in self.kinds[:2])
        self.out = types["sched_switch_out"].dtype if self.ready else None
        self.into = types["sched_switch_in"].dtype if self.ready else None
        self.wake = types["sched_wake"].dtype if self.kinds[2] >= 0 else None
        if self.out is not None and self.into is not None:
            self.get_out = _getter(
                self.out, "ts_ns cpu aux next_tid next_tgid syscall_nr flags throttled_ns arg0"
            )
            self.get_in = _getter(self.into, "ts_ns cpu prev_tid prev_tgid throttled_ns")
        if self.wake is not None:
            self.get_wake = _getter(self.wake, "ts_ns aux waker_tid waker_tgid waker_nr softirq_vec")


def _getter(dtype: np.dtype[Any], fields: str) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    names = dtype.names or ()
    return itemgetter(*(names.index(f) for f in fields.split()))


class ThreadTimeline:
    """The scheduling history of one thread: read with :meth:`before`, backwards.

    Wake-ups that changed nothing (of a running or runnable thread, or a second one) are left out.
    """

    def __init__(self, tid: int, rows: Events, layout: Layout, fd_kind: int, fd_dtype: np.dtype[Any] | None):
        self.tid = tid
        self.tgid = int(rows["tgid"][-1]) if len(rows) else 0
        self._layout = layout
        kind = rows["kind"]
        out_kind, in_kind, wake_kind = layout.kinds
        outs, ins = kind == out_kind, kind == in_kind
        at = np.flatnonzero(outs | ins | (kind == wake_kind)) if layout.ready else np.empty(0, np.intp)
        code = np.full(len(at), _WAKE, np.int8)
        code[ins[at]] = _IN
        if layout.out is not None and len(at):
            left = np.flatnonzero(outs)
            flags = rows.view(layout.out)["flags"][left]
            # A thread preempted on its way to sleep is still runnable, whatever its state says.
            still = (rows["aux"][left] == 0) | ((flags & _PREEMPTED) != 0)
            code[outs[at]] = np.where(still, _OFF, _BLOCK)
            keep = np.ones(len(at), np.bool_)
            keep[1:] = (code[1:] != _WAKE) | (code[:-1] == _BLOCK)
            code, at = code[keep], at[keep]
        sched = take(rows, at)
        self.ts: list[int] = sched["ts_ns"].tolist()
        self._code: list[int] = code.tolist()
        self._outs = sched.view(layout.out) if layout.out is not None else sched
        self._ins = sched.view(layout.into) if layout.into is not None else sched
        self._wakes = sched.view(layout.wake) if layout.wake is not None else sched
        self._rests: list[int] | None = None
        self._throttles: bool | None = None
        self._waits: dict[int, Wait] = {}
        #: True when the thread was ever seen leaving or getting a CPU: it is watched.
        self.known = any(c != _WAKE for c in self._code[:2])
        fds = take(rows, kind == fd_kind)
        self._fds: Events | None = fds.view(fd_dtype) if fd_dtype is not None and len(fds) else None
        self._fd_ts: list[int] = fds["ts_ns"].tolist() if self._fds is not None else []

    def before(self, t: int) -> Interval:
        """Return what the thread was doing just before *t*, and since when."""
        i = bisect_left(self.ts, t) - 1
        code = self._code
        following = code[i + 1] if i + 1 < len(code) else -1
        if i < 0:
            if following in (_OFF, _BLOCK):
                return Interval(BEGINNING, RUNNING, i)
            if following == _WAKE:
                return Interval(BEGINNING, BLOCKED, i, True)
            return Interval(BEGINNING, UNKNOWN_STATE, i)
        start = self.ts[i]
        this = code[i]
        if this == _IN:
            # Two switch-ins, or a wake-up, in a row: the switch-out between them was lost.
            lost = following in (_IN, _WAKE)
            return Interval(start, UNKNOWN_STATE if lost else RUNNING, i)
        if following in (_OFF, _BLOCK):
            return Interval(start, UNKNOWN_STATE, i)  # the switch-in between was lost
        if this == _BLOCK:
            return Interval(start, BLOCKED, i, following != _WAKE)
        split, inferred = self._throttled_until(i)
        if t <= split:
            return Interval(start, THROTTLED, i, inferred)
        return Interval(max(start, split), RUNNABLE if this == _OFF else WAKEUP, i, following < 0)

    def awake(self, t: int) -> bool:
        """Return whether the thread was on a CPU or wanted one just before *t*: known, and not blocked."""
        i = bisect_left(self.ts, t) - 1
        code = self._code
        following = code[i + 1] if i + 1 < len(code) else -1
        if i < 0:
            return following in (_OFF, _BLOCK)
        if code[i] == _IN:
            return following not in (_IN, _WAKE)
        return code[i] != _BLOCK and following not in (_OFF, _BLOCK)

    def _throttled_until(self, i: int) -> tuple[int, bool]:
        # The off-CPU interval i ends at event i+1, a switch-in, or is still open. Its throttled part starts
        # where the thread became runnable: the CPU's counter says how long, not when.
        start = self.ts[i]
        if self._throttles is None:
            # On most hosts nothing ever is: asked once, not at every interval.
            code = np.array(self._code, np.int8)
            off = (code == _OFF) | (code == _BLOCK)
            self._throttles = bool(
                self._outs["throttled_ns"][off].any()
                or self._ins["throttled_ns"][code == _IN].any()
                or (self._outs["flags"][off] & _THROTTLED).any()
            )
        if not self._throttles or i + 1 >= len(self.ts):
            return start, False
        out_at = i if self._code[i] == _OFF else i - 1
        if out_at < 0 or self._code[out_at] not in (_OFF, _BLOCK):
            return start, False
        out = self._layout.get_out(self._outs[out_at].item())
        into = self._layout.get_in(self._ins[i + 1].item())
        flagged = bool(out[6] & _THROTTLED) and self._code[i] == _OFF
        delta = into[4] - out[7] if out[1] == into[1] else 0
        if delta > 0:
            return start + min(delta, into[0] - start), False
        # Moved to another CPU, or a counter that went backwards: only the flag is left to go by.
        return (into[0], True) if flagged else (start, False)

    def rival(self, at: int) -> Rival:
        """Return who had the CPU during the runnable interval that began at event *at*."""
        start = self.ts[at]
        tid = tgid = cpu = 0
        end = start
        if self._code[at] == _OFF:
            out = self._layout.get_out(self._outs[at].item())
            cpu, tid, tgid = out[1], out[3], out[4]
        if at + 1 < len(self.ts) and self._code[at + 1] == _IN:
            into = self._layout.get_in(self._ins[at + 1].item())
            end, cpu = into[0], into[1]
            if into[2] not in (0, self.tid):
                tid, tgid = into[2], into[3]
        return Rival(tid, tgid, cpu, start, end - start)

    def wait(self, at: int) -> Wait:
        """Return the facts of the blocked interval that began at event *at* (-1: before the first event)."""
        found = self._waits.get(at)
        if found is None:
            found = self._waits[at] = self._wait(at)
        return found

    def _wait(self, at: int) -> Wait:
        start = nr = prev_state = arg0 = 0
        fd: FdBlock | None = None
        if at >= 0:
            out = self._layout.get_out(self._outs[at].item())
            start, prev_state, nr, arg0 = out[0], out[2], out[5], out[8]
            fd = self._fd_block(at)
        else:
            start, nr = BEGINNING, -2
        waker: tuple[int, ...] = (0, NO_WAKE, 0, 0, -2, 0)
        end = self.ts[at + 1] if at + 1 < len(self.ts) else start
        if at + 1 < len(self.ts) and self._code[at + 1] == _WAKE:
            waker = self._layout.get_wake(self._wakes[at + 1].item())
        _, context, tid, tgid, waker_nr, vec = waker
        return Wait(start, end, nr, arg0, prev_state, tid, tgid, context, vec, waker_nr, fd)

    def _fd_block(self, at: int) -> FdBlock | None:
        # Joined by position: between two switch-ins a thread leaves the CPU once.
        if self._fds is None:
            return None
        lo = self.ts[at - 1] if at > 0 and self._code[at - 1] == _IN else 0
        after = at + 1
        while after < len(self.ts) and self._code[after] != _IN:
            after += 1
        hi = self.ts[after] if after < len(self.ts) else 1 << 63
        a, b = bisect_left(self._fd_ts, lo), bisect_right(self._fd_ts, hi)
        if a >= b:
            return None
        near = min(range(a, b), key=lambda k: abs(self._fd_ts[k] - self.ts[at]))
        row = self._fds[near]
        return FdBlock(int(row["aux"]), int(row["inode"]), int(row["key"]), int(row["fd"]), int(row["dev"]))

    def intervals(self, start_ns: int, end_ns: int) -> list[tuple[int, int, Interval]]:
        """Return the states that tile [start, end], ascending, each clipped to it."""
        found: list[tuple[int, int, Interval]] = []
        t = end_ns
        while t > start_ns:
            interval = self.before(t)
            since = max(interval.start_ns, start_ns)
            found.append((since, t, interval))
            t = since
        return found[::-1]

    def awake_since(self, t: int) -> int:
        """Return since when the thread had not been blocked (nor lost from sight) just before *t*."""
        if self._rests is None:
            self._rests = self._find_rests()
        i = bisect_left(self.ts, t) - 1  # the interval that holds the moment before t
        if i < 0:
            return t
        k = bisect_right(self._rests, i) - 1
        if k < 0:
            return self.ts[0]
        rest = self._rests[k]
        return self.ts[rest + 1] if rest < i else t

    def _find_rests(self) -> list[int]:
        """Positions of the intervals in which the thread slept, or of which too little was seen."""
        code = np.array(self._code, np.int8)
        if not len(code):
            return []
        following = np.append(code[1:], -1)
        lost = np.where(
            code == _IN,
            (following == _IN) | (following == _WAKE),
            (code != _BLOCK) & ((following == _OFF) | (following == _BLOCK)),
        )
        rests: list[int] = np.flatnonzero((code == _BLOCK) | lost).tolist()
        return rests

    def poll_edges(self, calls: frozenset[int]) -> tuple[list[int], list[int]]:
        """Return when the thread left the CPU inside one of *calls*, and those calls' numbers."""
        if self._layout.out is None:
            return [], []
        at = np.flatnonzero(np.array(self._code, np.int8) == _BLOCK)
        at = at[np.isin(self._outs["syscall_nr"][at], np.array(sorted(calls), np.int64))]
        return self._outs["ts_ns"][at].tolist(), self._outs["syscall_nr"][at].tolist()

    def next_in(self, t: int) -> int | None:
        """Return when the thread next got a CPU at or after *t*, or None."""
        i = bisect_left(self.ts, t)
        while i < len(self.ts):
            if self._code[i] == _IN:
                return self.ts[i]
            i += 1
        return None

    def in_after(self, at: int) -> int | None:
        """Return when the thread next got a CPU after the event at *at*, or None."""
        for i in range(at + 1, len(self._code)):
            if self._code[i] == _IN:
                return self.ts[i]
        return None

    def context(self, at: int) -> int:
        """Return in what context the blocked interval that began at event *at* ended; NO_WAKE when not seen."""
        if at + 1 < len(self._code) and self._code[at + 1] == _WAKE:
            return int(self._wakes["aux"][at + 1])
        return NO_WAKE

    def rests(self, t: int) -> bool:
        """Return whether the thread had gone to sleep, or was just woken, when last seen before *t*: at a look."""
        i = bisect_left(self.ts, t) - 1
        return i >= 0 and self._code[i] in (_BLOCK, _WAKE)

    def block_before(self, at: int) -> int:
        """Return the position of the block before the event at *at*, -1 when none is near."""
        for i in range(at - 1, max(at - _NEAR_EVENTS, -1), -1):
            if self._code[i] == _BLOCK:
                return i
        return -1

    def block_after(self, at: int) -> int:
        """Return the position of the block after the event at *at*, -1 when none is near."""
        for i in range(at + 1, min(at + _NEAR_EVENTS, len(self._code))):
            if self._code[i] == _BLOCK:
                return i
        return -1

    def next_out(self, t: int) -> int | None:
        """Return when the thread next left the CPU after *t*, for whatever reason, or None."""
        i = bisect_right(self.ts, t)
        while i < len(self.ts):
            if self._code[i] in (_OFF, _BLOCK):
                return self.ts[i]
            i += 1
        return None

    def next_block(self, t: int) -> int | None:
        """Return when the thread next blocked after *t*, preemptions aside, or None."""
        i = bisect_right(self.ts, t)
        while i < len(self.ts):
            if self._code[i] == _BLOCK:
                return self.ts[i]
            i += 1
        return None
