"""Who waited for whom between an engine core and its workers: edges that spinning hides from the scheduler."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from whyspan.engines.records import StepRun


class Handoff(NamedTuple):
    """A thread waited, and what it waited for came at ``at_ns`` from another thread."""

    at_ns: int
    tid: int
    tgid: int


class Work(NamedTuple):
    """A stretch in which a thread is known to have worked for a step."""

    start_ns: int
    end_ns: int
    step: StepRun


class Handoffs:
    """The hand-overs and the known work of an engine's threads, from its steps, in order.

    Of a step in progress it is not known yet who works at it: those who did at the step before are taken to, and the
    core to wait for the one of them that took longest.
    """

    def __init__(self, steps: Iterable[StepRun], pending: bool = False) -> None:
        """*pending*: what a step in progress will bring is waited for; else it came after the end."""
        self._into: dict[int, list[Handoff]] = defaultdict(list)
        self._work: dict[int, list[Work]] = defaultdict(list)
        self._awaits: dict[int, tuple[int, int, int]] = {}  # by core thread: since when, whom
        last_end: dict[int, int] = {}
        self._processes: dict[int, int] = {}  # of the workers
        slowest: tuple[int, int, int] | None = None
        done_ns = 0
        for step in steps:
            if step.done_ns:
                slowest, done_ns = self._add(step, last_end) or slowest, step.done_ns
            elif pending:
                self._open(step, last_end, slowest, done_ns)
        for edges in self._into.values():
            edges.sort()
        for work in self._work.values():
            work.sort(key=lambda w: w.start_ns)
        self._at = {tid: [e.at_ns for e in edges] for tid, edges in self._into.items()}
        self._starts = {tid: [w.start_ns for w in work] for tid, work in self._work.items()}

    def _open(
        self, step: StepRun, last_end: dict[int, int], slowest: tuple[int, int, int] | None, done_ns: int
    ) -> None:
        core = step.core_tid
        self._work[core].append(Work(step.begin_ns, step.scheduled_ns, step))
        if slowest is None or core in self._awaits:
            return
        # Those that have told of it are done with it; one that has not is still at it.
        done = {e.tid for e in step.executions}
        pending = [worker for worker in last_end if worker not in done]
        _, tid, tgid = slowest
        if tid in done and pending:
            tid, tgid = pending[0], self._processes[pending[0]]
        told = max(step.executions, key=lambda e: e.end_ns, default=None)
        if told is not None and not pending:  # all are done, and the core has yet to take the result
            self._into[core].append(Handoff(told.end_ns, told.tid, told.tgid))
            return
        for worker, end in last_end.items():
            if end < step.scheduled_ns:
                self._into[worker].append(Handoff(step.scheduled_ns, core, step.core))
        self._awaits[core] = max(step.scheduled_ns, done_ns), tid, tgid

    def _add(self, step: StepRun, last_end: dict[int, int]) -> tuple[int, int, int] | None:
        """Take in a finished step; return (end, tid, tgid) of the worker that ended last."""
        core = step.core_tid
        by_thread: dict[int, tuple[int, int, int]] = {}
        for e in step.executions:
            if e.tid == core:  # the core runs the model itself
                self._work[core].append(Work(e.begin_ns, e.end_ns, step))
                continue
            begin, end, tgid = by_thread.get(e.tid, (e.begin_ns, e.end_ns, e.tgid))
            by_thread[e.tid] = (min(begin, e.begin_ns), max(end, e.end_ns), tgid)
        last: tuple[int, int, int] | None = None
        for tid, (begin, end, tgid) in by_thread.items():
            self._work[tid].append(Work(begin, end, step))
            # The core notes that it has sent the batch once it has: the worker may be at it by then.
            sent = min(step.sent_ns, begin)
            # Sent while the worker was still at the step before, the batch held nobody up.
            if sent > max(last_end.get(tid, 0), step.begin_ns):
                self._into[tid].append(Handoff(sent, core, step.core))
            self._processes[tid] = tgid
            last_end[tid] = max(last_end.get(tid, 0), end)
            if last is None or end > last[0]:
                last = (end, tid, tgid)
        # Workers compute together: those who began wait for the last one to.
        late = max(by_thread.items(), key=lambda kv: kv[1][0], default=None)
        for tid, (begin, end, _) in by_thread.items():
            if late is not None and begin < late[1][0] < end:
                self._into[tid].append(Handoff(late[1][0], late[0], late[1][2]))
        self._work[core].append(Work(step.begin_ns, step.scheduled_ns, step))
        if step.got_ns:
            self._work[core].append(Work(step.got_ns, step.done_ns, step))
        # The result came while the core waited for it: the last worker to end held it up.
        if last is not None and step.wait_ns < last[0] <= step.got_ns:
            self._into[core].append(Handoff(*last))
        return last

    def knows(self, tid: int) -> bool:
        """Return whether the thread's waits are known, so that nothing need be guessed about it."""
        return tid in self._work

    def latest(self, tid: int, after_ns: int, before_ns: int) -> Handoff | None:
        """Return the newest hand-over into a thread in (after, before).

        Of a core that still waits it is at *before*: until then nothing has come.
        """
        awaits = self._awaits.get(tid)
        if awaits is not None and awaits[0] < before_ns:
            return Handoff(before_ns, awaits[1], awaits[2])
        at = self._at.get(tid)
        if not at:
            return None
        k = bisect_left(at, before_ns) - 1
        return self._into[tid][k] if k >= 0 and at[k] > after_ns else None

    def work_at(self, tid: int, t: int) -> Work | None:
        """Return the step a thread worked for at a moment, when it is known to have."""
        starts = self._starts.get(tid)
        if not starts:
            return None
        k = bisect_left(starts, t) - 1
        for i in range(k, max(k - 4, -1), -1):
            work = self._work[tid][i]
            if work.start_ns < t <= work.end_ns:
                return work
        return None
