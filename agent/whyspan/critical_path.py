"""The critical path of a request: backwards from its end, each nanosecond charged once."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from whyspan.edges import Edge, Edges
from whyspan.engines import EngineView
from whyspan.inbox import Inboxes, handover
from whyspan.locks import Locks, LockWait
from whyspan.model import UNFINISHED, Request
from whyspan.syscalls import NOT_APPLICABLE, SEND
from whyspan.threads import Timelines
from whyspan.timeline import (
    BLOCKED,
    NO_WAKE,
    RUNNABLE,
    RUNNING,
    SOFTIRQ,
    TASK,
    THROTTLED,
    UNKNOWN_STATE,
    WAKEUP,
    Rival,
    Wait,
)
from whyspan.unfinished import unfinished_work

NET_RX: Final = 3  # softirq vector. Source: include/linux/interrupt.h
#: States of a thread that a signal or a debugger stopped: __TASK_STOPPED, __TASK_TRACED. Source: include/linux/sched.h
STOPPED: Final = 0x0004 | 0x0008

MAX_SLICES: Final = 256
MAX_STEPS: Final = 20_000
# Hops allowed without time going back; more is a cycle made of lost or inconsistent events.
_MAX_STALL: Final = 8
# Waits for locks within waits for locks.
_MAX_HELD: Final = 32
_MAX_OWN_THREADS: Final = 64
_OWN_DEPTH: Final = 3
_OWN_WAKES_READ: Final = 256


class TilingError(Exception):
    """The segments do not tile the request: a defect in the walk, never in the events."""


class Via(NamedTuple):
    """A wait for a lock: of thread ``tid``, from ``start_ns`` to ``end_ns``. ``kind`` and ``library`` as in ``locks``.

    ``outer`` is the wait that its waiter held up in turn.
    """

    tid: int
    tgid: int
    kind: str
    address: int
    start_ns: int
    end_ns: int
    library: str = ""
    outer: Via | None = None

    @property
    def ns(self) -> int:
        """Length of the whole wait."""
        return self.end_ns - self.start_ns


class PathSegment(NamedTuple):
    """A piece of the path and its raw evidence: ``wait`` of a blocked one, ``rival`` of one without a CPU.

    A blocked segment whose ``wait`` was ended by a watched task is one the walk could not follow. ``via`` is the wait
    for a lock that the segment stands in place of: what the holder did meanwhile. On the waiter's own segment nobody
    was seen to hold it.
    """

    start_ns: int
    end_ns: int
    tgid: int
    tid: int
    state: str
    inferred: bool = False
    wait: Wait | None = None
    rival: Rival | None = None
    via: Via | None = None

    @property
    def ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def whole_ns(self) -> int:
        """Length of the wait this is a piece of: a cut does not make a long wait short."""
        if self.wait is not None and self.wait.start_ns >= 0:
            return max(self.ns, self.wait.end_ns - self.wait.start_ns)
        return max(self.ns, self.rival.whole_ns) if self.rival is not None else self.ns


class Path(NamedTuple):
    """Segments, ascending and disjoint, that tile [start, end] exactly."""

    start_ns: int
    end_ns: int
    segments: list[PathSegment]
    hops: int

    def ns(self, *states: str) -> int:
        """Return the time spent in the given states."""
        return sum(s.ns for s in self.segments if s.state in states)


def walk(
    timelines: Timelines,
    request: Request,
    own: frozenset[int] = frozenset(),
    engine: EngineView | None = None,
) -> Path:
    """Return the critical path of a request; of one that has not ended, up to its ``end_ns``.

    The interval is cut where the front end read it, where it handed it to another process of the service, and
    wherever the response was written to, at most 256 times; each slice is walked from its end on the thread that
    ended it. A wait for a lock is replaced by what the holder did from its start to its end; from there the walk goes
    on with the waiter. Where the request did not come to its end, something else woke the thread that waits for it:
    the walk goes on with the one that was at work for it, marked ``inferred``.

    Args:
        timelines: The window.
        request: The request, or a slice of it.
        own: The threads set to work for it, where they are known from an earlier slice.
        engine: What its engine's marks tell: where the request passed from thread to thread, and what the threads
            that spin were waiting for.

    Raises:
        TilingError: The result does not tile the interval; a defect of this module.
    """
    walker = _Walk(timelines, request, own, engine)
    if request.end_ns > request.start_ns:
        lo = request.start_ns
        for hi, tid, tgid in cuts(timelines, request, engine):
            walker.slice(lo, hi, tid, tgid)
            lo = hi
    path = Path(request.start_ns, max(request.end_ns, request.start_ns), merged(walker.done), walker.hops)
    check(path)
    return path


def check(path: Path) -> None:
    """Raise TilingError unless the segments tile the path's interval."""
    at = path.start_ns
    for s in path.segments:
        if s.start_ns != at or s.end_ns <= s.start_ns:
            raise TilingError(f"segment {s.start_ns}..{s.end_ns} where {at} was due")
        at = s.end_ns
    if at != path.end_ns:
        raise TilingError(f"path ends at {at}, request at {path.end_ns}")


def merged(segments: list[PathSegment]) -> list[PathSegment]:
    """Join neighbours that differ in nothing but time."""
    out: list[PathSegment] = []
    for s in segments:
        if out and out[-1].end_ns == s.start_ns and out[-1][2:] == s[2:]:
            out[-1] = out[-1]._replace(end_ns=s.end_ns)
        else:
            out.append(s)
    return out


def cuts(
    timelines: Timelines, request: Request, engine: EngineView | None = None
) -> list[tuple[int, int, int]]:
    """Return the ends of the slices as (time, tid, tgid), ascending; the last is the request's end."""
    rows = timelines.keyed("sock_send", "key", request.cookie)
    found: list[tuple[int, int, int]] = []
    if len(rows) and request.cookie:
        ts = rows["ts_ns"]
        inside = (ts > np.uint64(request.start_ns)) & (ts <= np.uint64(request.end_ns))
        rows = rows[inside & (rows["tgid"] == request.tgid)]
        last = 0
        for t, tid in zip(rows["ts_ns"].tolist(), rows["tid"].tolist(), strict=True):
            if t > last:
                found.append((t, tid, request.tgid))
                last = t
    end_tid = request.end_tid or (found[-1][1] if found else request.start_tid)
    if found and found[-1][0] == request.end_ns:
        found.pop()
    if len(found) >= MAX_SLICES:
        step = len(found) / (MAX_SLICES - 1)
        found = [found[int(i * step)] for i in range(MAX_SLICES - 1)]
    if request.start_ns < request.recv_ns < request.end_ns:
        # Before it was read it waited for the reader: what did that thread do instead?
        found = [c for c in found if c[0] > request.recv_ns]
        found.insert(0, (request.recv_ns, request.start_tid, request.tgid))
    passed = engine.cuts() if engine is not None else []
    if not passed:
        handed = handover(timelines, request)
        passed = [handed] if handed is not None and handed[0] < request.end_ns else []
    # Before it was read nobody had it, whatever a mark says.
    found = sorted([*found, *(p for p in passed if p[0] > request.recv_ns)])
    end = end_tid, request.tgid
    if engine is not None and _unfinished(request):
        # What has not come is with whoever has the request.
        holder = engine.holder(request.end_ns)
        end = holder if holder is not None and timelines.longer(holder[0]).known else end
    return [*found, (request.end_ns, *end)]


def _unfinished(request: Request) -> bool:
    return request.outcome == "open" or request.outcome in UNFINISHED


def own_threads(timelines: Timelines, request: Request) -> frozenset[int]:
    """Return the threads that were set to work for this request, as far as wake-ups tell.

    These are the threads woken between the arrival of the head and the reader's next rest, and in turn the
    threads those woke in their next run.
    """
    own: set[int] = set()
    frontier = [(request.start_tid, max(request.recv_ns, request.start_ns))]
    for _ in range(_OWN_DEPTH):
        following: list[tuple[int, int]] = []
        for tid, since in frontier:
            rows = timelines.keyed("sched_wake", "waker_tid", tid)
            if not len(rows):
                continue
            until = timelines.thread(tid).next_block(since)
            ts = rows["ts_ns"]
            a = int(ts.searchsorted(np.uint64(since), "left"))
            b = int(ts.searchsorted(np.uint64(until or request.end_ns), "right"))
            part = rows[a : min(b, a + _OWN_WAKES_READ)]
            for woken, t, context in zip(
                part["tid"].tolist(), part["ts_ns"].tolist(), part["aux"].tolist(), strict=True
            ):
                if context == TASK and woken not in own and woken != request.start_tid:
                    own.add(woken)
                    following.append((woken, t))
                    if len(own) >= _MAX_OWN_THREADS:
                        return frozenset(own)
        frontier = following
    return frozenset(own)


def _infer(back: list[PathSegment], since: int) -> None:
    back[since:] = [s._replace(inferred=True) for s in back[since:]]


def _same(via: Via, lock: LockWait, tgid: int) -> bool:
    return (via.kind, via.address, via.tgid) == (lock.kind, lock.address, tgid)


def _via(tid: int, tgid: int, lock: LockWait, outer: Via | None) -> Via:
    # Whoever had it waited for it, too, behind another: the first waiter's wait is what it is about.
    if outer is not None and _same(outer, lock, tgid):
        return outer
    return Via(tid, tgid, lock.kind, lock.address, lock.start_ns, lock.end_ns, lock.library, outer)


class _Held(NamedTuple):
    """Where the walk goes on after a wait for a lock: on the waiter, at the wait's start."""

    lo: int
    tid: int
    tgid: int
    via: Via | None
    guessed_from: int
    unsure_from: int  # from here on in what was found the holder was chosen by inference; -1 known


class _Walk:
    """The state of one walk; ``done`` holds the finished slices, ascending."""

    def __init__(
        self, timelines: Timelines, request: Request, own: frozenset[int], engine: EngineView | None
    ) -> None:
        self.handoffs = engine.handoffs if engine is not None and engine.core else None
        self.timelines = timelines
        self.edges = timelines.shared(Edges)
        self.inboxes = timelines.shared(Inboxes)
        self.locks = timelines.shared(Locks)
        self.done: list[PathSegment] = []
        self.hops = 0
        self.steps = 0
        self._request = request
        self._own: frozenset[int] | None = own or None
        self._unfinished = _unfinished(request)

    @property
    def own(self) -> frozenset[int]:
        if self._own is None:
            self._own = own_threads(self.timelines, self._request)
        return self._own

    def slice(self, lo: int, hi: int, tid: int, tgid: int) -> None:
        """Walk (lo, hi] backwards from *tid*, appending to ``done``."""
        back: list[PathSegment] = []
        t = hi
        stall = 0
        edge: Edge | None = None
        guess: tuple[int, int, int] | None = None
        marked = self.handoffs is not None and self.handoffs.knows(tid)
        awaited = marked or not (self._unfinished and hi == self._request.end_ns)
        guessed_from = -1  # from here on in `back` the thread was chosen by inference
        polled = False  # the edge is a message that a spinning thread looked for
        held: list[_Held] = []  # innermost last
        via: Via | None = None
        while t > lo or held:
            if t <= lo:
                if guessed_from >= 0:
                    _infer(back, guessed_from)
                lo, tid, tgid, via, guessed_from, unsure_from = held.pop()
                if unsure_from >= 0:
                    _infer(back, unsure_from)
                edge = None
                continue
            self.steps += 1
            if self.steps > MAX_STEPS:
                back.append(PathSegment(held[0].lo if held else lo, t, tgid, tid, UNKNOWN_STATE))
                break
            if stall > _MAX_STALL:
                back.append(PathSegment(lo, t, tgid, tid, UNKNOWN_STATE, via=via))
                t, stall = lo, 0
                continue
            asked = t
            thread = self.timelines.thread(tid)
            start, state, at, inferred = thread.before(t)
            if start < 0:  # as it was when the window began: since when, and in what?
                thread = self.timelines.longer(tid)
                start, state, at, inferred = thread.before(t)
            floor = max(start, lo)
            # Who has a lock holds others up whatever it is about: no data that came meanwhile did.
            if state == RUNNING and edge is None and via is None:
                edge = self._edge(tid, start, t)
                seen = None
                marked = self.handoffs is not None and self.handoffs.knows(tid)
                if marked:
                    seen = self._handed(tid, max(thread.awake_since(start), lo), t)
                elif self.timelines.facts.spins(tid):
                    seen = self.inboxes.latest(tid, tgid, max(thread.awake_since(start), lo), t)
                # What came last is what it went on with: a channel may be read long after it was written to.
                latest = seen is not None and (edge is None or seen.write_ns > edge.write_ns)
                polled = latest and not marked
                edge = seen if latest else edge
            if (
                edge is not None
                and state in (RUNNING, RUNNABLE, WAKEUP, THROTTLED)
                and edge.write_ns >= floor
            ):
                # What the thread needed came at write_ns: until then it held nobody up.
                floor = edge.write_ns
            hop: tuple[int, int, int] | None = None
            if state == BLOCKED:
                wait = thread.wait(at)
                lock = self.locks.find(tid, thread, at, wait)
                if lock is not None and lock.holder_tid and via is not None and _same(via, lock, tgid):
                    # It waited for the lock that it is on the path for: before, somebody else had it all along.
                    if guessed_from >= 0:
                        _infer(back, guessed_from)
                    guessed_from = len(back) if lock.guessed else -1
                    tid, tgid = lock.holder_tid, lock.holder_tgid
                    self.hops += 1
                    stall += 1
                    edge = None
                    continue
                if lock is not None and lock.holder_tid and len(held) < _MAX_HELD:
                    held.append(_Held(lo, tid, tgid, via, guessed_from, len(back) if lock.guessed else -1))
                    via = _via(tid, tgid, lock, via)
                    lo, guessed_from, awaited = max(lock.start_ns, lo), -1, True
                    tid, tgid = lock.holder_tid, lock.holder_tgid
                    self.hops += 1
                    stall += 1
                    edge = None
                    continue
                hop = self._waker(tid, wait, t) or self._napped(tid, wait, max(start, lo), t)
                if not awaited and (hop is None or hop[1] not in self.own):
                    # Whoever woke it did not bring what the request was waiting for.
                    at_ns = wait.end_ns if wait.start_ns < wait.end_ns < t else t
                    guess = unfinished_work(self.timelines, self.own, max(at_ns, lo))
                    hop = guess or hop
                awaited = True
                if hop is not None:
                    floor = max(hop[0], lo)  # on its way from the one to the other
                if floor < t:
                    own = _via(tid, tgid, lock, via) if lock is not None else via
                    back.append(
                        self._blocked(PathSegment(floor, t, tgid, tid, state, inferred, via=own), wait)
                    )
                    t = floor
                edge = None
            elif state == UNKNOWN_STATE:
                born = self._birth(tid, t) if start < 0 else None
                if born is not None and born[0] < t:
                    since = max(born[0], lo)
                    back.append(PathSegment(since, t, tgid, tid, WAKEUP, True, via=via))
                    t, hop = since, born
                else:
                    back.append(PathSegment(floor, t, tgid, tid, state, via=via))
                    t = floor
                edge = None
            else:
                if floor < t:
                    rival = thread.rival(at) if state != RUNNING else None
                    # Without a CPU it lost time whatever it was about; running, it may have been at something else.
                    guessed = inferred or (polled and edge is not None and state == RUNNING)
                    back.append(PathSegment(floor, t, tgid, tid, state, guessed, rival=rival, via=via))
                t = floor
                if edge is not None and t == edge.write_ns:
                    hop, edge = (t, edge.tid, edge.tgid), None
            if hop is not None:
                if guessed_from >= 0:
                    _infer(back, guessed_from)
                guessed_from = len(back) if hop is guess else -1
                self.hops += 1
                t, tid, tgid = min(t, hop[0]), hop[1], hop[2]
            stall = stall + 1 if t >= asked else 0
        if guessed_from >= 0:
            _infer(back, guessed_from)
        self.done.extend(reversed(back))

    def _blocked(self, piece: PathSegment, wait: Wait) -> PathSegment:
        if wait.context == NO_WAKE and wait.syscall_nr <= NOT_APPLICABLE and not wait.prev_state & STOPPED:
            return piece._replace(state=UNKNOWN_STATE, inferred=False)
        # A watched waker that could not be followed: its own switches were lost.
        astray = wait.context == TASK and self.timelines.watched(wait.waker_tid)
        return piece._replace(inferred=piece.inferred or astray, wait=wait)

    def _napped(self, tid: int, wait: Wait, after_ns: int, before_ns: int) -> tuple[int, int, int] | None:
        """Return where to go on from a thread of the engine that polled in its sleep: no wake-up told it anything."""
        if self.handoffs is None or wait.context == TASK or wait.prev_state & STOPPED:
            return None
        found = self._handed(tid, after_ns, before_ns)
        return (found.write_ns, found.tid, found.tgid) if found is not None else None

    def _handed(self, tid: int, after_ns: int, before_ns: int) -> Edge | None:
        """Return what a thread of the engine waited for awake, as its marks tell."""
        found = self.handoffs.latest(tid, after_ns, before_ns) if self.handoffs is not None else None
        if found is None or not (self.timelines.watched(found.tid) or self.timelines.longer(found.tid).known):
            return None
        return Edge(found.at_ns, found.at_ns, found.tid, found.tgid)

    def _edge(self, tid: int, run_start: int, t: int) -> Edge | None:
        """Return the data edge into the run that ends at *t*, if the reader was awake when it was written."""
        if not self.edges.reads_in(tid, run_start, t):
            return None
        awake_since = self.timelines.thread(tid).awake_since(run_start)
        edge = self.edges.latest(tid, run_start, awake_since, t, self.own)
        return edge if edge is not None and self._running(edge.tid, edge.write_ns) else None

    def _waker(self, tid: int, wait: Wait, t: int) -> tuple[int, int, int] | None:
        """Return (time, tid, tgid) to continue at, or None where the chain ends."""
        if wait.context == NO_WAKE or wait.waker_tid in (0, tid):
            return None
        inline_send = wait.context == SOFTIRQ and wait.softirq_vec == NET_RX and wait.waker_nr in SEND
        if wait.context != TASK and not inline_send:
            return self._sender(tid, wait, t)
        at = min(wait.end_ns, t)
        return (at, wait.waker_tid, wait.waker_tgid) if self._running(wait.waker_tid, at) else None

    def _sender(self, tid: int, wait: Wait, t: int) -> tuple[int, int, int] | None:
        # A network interrupt delivered what a watched thread of this host sent: the bytes name it.
        if wait.context != SOFTIRQ or wait.softirq_vec != NET_RX:
            return None
        resumed = self.timelines.thread(tid).next_in(wait.end_ns)
        if resumed is None:
            return None
        edge = self.edges.first(tid, resumed, self.own)
        if edge is None:
            return None
        at = min(edge.write_ns, wait.end_ns, t)
        if at <= wait.start_ns or not self._running(edge.tid, at):
            return None
        return at, edge.tid, edge.tgid

    def _running(self, tid: int, t: int) -> bool:
        return self.timelines.watched(tid) and self.timelines.thread(tid).before(t).state == RUNNING

    def _birth(self, tid: int, t: int) -> tuple[int, int, int] | None:
        rows = self.timelines.keyed("sched_fork", "child_tid", tid)
        if not len(rows):
            return None
        at, parent, parent_tgid = int(rows["ts_ns"][-1]), int(rows["tid"][-1]), int(rows["tgid"][-1])
        return (at, parent, parent_tgid) if at < t and self._running(parent, at) else None
