"""Which code a request's critical path was in: samples of its threads, as stacks with names. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from whyspan.facts import Facts
from whyspan.model import CodeStack, LockFact, Segment, StackFact
from whyspan.threads import Timelines
from whyspan.timeline import RUNNING

#: Stacks kept with a finding, those that stand for most time first.
MAX_STACKS: Final = 32
#: Frames kept of each, the innermost first.
MAX_FRAMES: Final = 64
# Flags of cpu_sample.
HAS_GIL: Final = 1
_CUT: Final = 2 | 4 | 16
#: What Python's own evaluation is called in native stacks ends where Python's frames begin.
_WAITED_FOR_GIL: Final = "python.gil"
#: No shorter wait has been looked at (waits.py).
_LONG_WAIT_NS: Final = 100_000_000


class _Key(NamedTuple):
    cause: str
    tid: int
    stack: int
    holder: bool
    blocked: bool = False


def gather(segments: Sequence[Segment], timelines: Timelines, facts: Facts) -> list[CodeStack]:
    """Return the stacks that were sampled on the path, by cause and thread, those with most samples first.

    A sample counts for the segment that it falls into while the segment's thread ran. Of a wait for the interpreter
    lock those count that the lock's holder had meanwhile, as ``holder``.
    """
    counts: Counter[_Key] = Counter()
    flags: dict[int, int] = {}
    for s, stamps, stacks, aux in _sampled(segments, timelines):
        for i in range(bisect_right(stamps, s.start_ns - 1), bisect_right(stamps, s.end_ns - 1)):
            if stacks[i]:
                counts[_Key(s.cause, s.tid, stacks[i], False)] += 1
                flags[stacks[i]] = aux[i]
    _holders(segments, timelines, counts, flags)
    _waits(segments, timelines, counts, flags)
    # Two addresses in one line are one place for whoever reads.
    merged: dict[tuple[object, ...], CodeStack] = {}
    for key, n in counts.items():
        fact = facts.stack(key.stack)
        if fact is None:
            continue
        one = _named(key, fact, flags[key.stack], facts)
        same = (key.cause, key.tid, key.holder, key.blocked, (*one.kernel, *one.native, *one.python))
        known = merged.setdefault(same, one)
        known.samples += n
    return sorted(merged.values(), key=lambda c: (-c.samples, c.cause, c.tid))[:MAX_STACKS]


def _sampled(
    segments: Sequence[Segment], timelines: Timelines
) -> list[tuple[Segment, list[int], list[int], list[int]]]:
    rows: dict[int, tuple[list[int], list[int], list[int]]] = {}
    out = []
    for s in segments:
        if s.state != RUNNING:
            continue
        if s.tid not in rows:
            found = timelines.rows_of(s.tid, "cpu_sample")
            names = found.dtype.names or ()
            rows[s.tid] = (
                (found["ts_ns"].tolist(), found["stack"].tolist(), found["aux"].tolist())
                if "stack" in names
                else ([], [], [])
            )
        if rows[s.tid][0]:
            out.append((s, *rows[s.tid]))
    return out


def _holders(
    segments: Sequence[Segment], timelines: Timelines, counts: Counter[_Key], flags: dict[int, int]
) -> None:
    waits = [s for s in segments if s.cause == _WAITED_FOR_GIL and s.state != RUNNING]
    if not waits:
        return
    found = timelines.select("cpu_sample")
    if not len(found):
        return
    stamps = found["ts_ns"].tolist()
    for s in waits:
        for i in range(bisect_right(stamps, s.start_ns - 1), bisect_right(stamps, s.end_ns - 1)):
            row = found[i]
            if int(row["tgid"]) == s.tgid and int(row["aux"]) & HAS_GIL and int(row["stack"]):
                counts[_Key(s.cause, int(row["tid"]), int(row["stack"]), True)] += 1
                flags[int(row["stack"])] = int(row["aux"])


def _waits(
    segments: Sequence[Segment], timelines: Timelines, counts: Counter[_Key], flags: dict[int, int]
) -> None:
    """Add where the path's threads were while they were blocked for long: looked at once in each block."""
    looked: dict[int, list[tuple[int, int, int]]] = {}
    for s in segments:
        if s.state == RUNNING or s.end_ns - s.start_ns < _LONG_WAIT_NS:
            continue
        if s.tid not in looked:
            found = timelines.rows_of(s.tid, "wait_stack")
            names = found.dtype.names or ()
            looked[s.tid] = found[["ts_ns", "stack", "aux"]].tolist() if "stack" in names else []
        for ts_ns, stack, aux in looked[s.tid]:
            if s.start_ns <= ts_ns < s.end_ns and stack:
                counts[_Key(s.cause, s.tid, stack, False, True)] += 1
                flags[stack] = aux


def _named(key: _Key, fact: StackFact, flags: int, facts: Facts) -> CodeStack:
    locks = facts.locks(fact.tgid)
    return CodeStack(
        cause=key.cause,
        tgid=fact.tgid,
        tid=key.tid,
        thread=facts.thread_name(key.tid, fact.tgid),
        python=fact.python[:MAX_FRAMES],
        native=[_place(a, locks) for a in fact.user[:MAX_FRAMES]],
        kernel=fact.kernel[:MAX_FRAMES],
        cut=bool(flags & _CUT) or len(fact.python) > MAX_FRAMES,
        holder=key.holder,
        blocked=key.blocked,
    )


def _place(address: int, locks: LockFact | None) -> str:
    """Return a module and an offset in its code: what can be said without its symbols."""
    for r in locks.text if locks is not None else ():
        if r.start <= address < r.end:
            return f"{r.path.rpartition('/')[2]}+0x{address - r.start:x}"
    return f"0x{address:x}"
