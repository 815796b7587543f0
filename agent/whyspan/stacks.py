"""Which code a request's critical path was in: samples of its threads, as stacks with names. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from whyspan.facts import Facts
from whyspan.model import CodeStack, Segment, StackFact
from whyspan.threads import Timelines
from whyspan.timeline import RUNNING

#: Stacks kept with a finding, those that stand for most time first.
MAX_STACKS: Final = 32
#: Frames kept of each, the innermost first.
MAX_FRAMES: Final = 64
# Flags of cpu_sample.
HAS_GIL: Final = 1
_PYTHON_CUT: Final = 2 | 4
_NATIVE_CUT: Final = 16 | 64
#: What executes frames of Python: above it is what these have called, below it the interpreter itself.
_EVALUATES: Final = re.compile(r"(?:_PyEval_EvalFrameDefault|_PyEval_Vector|_TAIL_CALL_\w+)(?:\.\w+)* \[")
#: Code of the interpreter that has no name: it may be what executes frames, or anything else.
_INTERPRETER: Final = re.compile(r"(?:lib)?python3(?:\.\d+)?[a-z]*(?:\.so[.\d]*)?\+0x[0-9a-f]+")
#: A line that stands for frames that were not found.
MISSING: Final = "(frames missing)"
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
    named = []
    for key, n in counts.items():
        fact = facts.stack(key.stack)
        if fact is not None:
            named.append(_named(key, fact, flags[key.stack], facts))
            named[-1].samples = n
    return merged(named)


def merged(found: Iterable[CodeStack], limit: int = MAX_STACKS) -> list[CodeStack]:
    """Return stacks with those that are the same as one, those seen most often first, at most *limit*."""
    out: dict[tuple[object, ...], CodeStack] = {}
    for one in found:
        # Two addresses in one line are one place for whoever reads.
        same = (one.cause, one.tid, one.holder, one.blocked, one.work, *one.kernel, *one.native, *one.python)
        known = out.get(same)
        total = one.samples + (known.samples if known is not None else 0)
        out[same] = msgspec.structs.replace(one, samples=total)
    return sorted(out.values(), key=lambda c: (-c.samples, c.cause, c.tid))[:limit]


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
    return CodeStack(
        cause=key.cause,
        tgid=fact.tgid,
        tid=key.tid,
        thread=facts.thread_name(key.tid, fact.tgid),
        python=fact.python[:MAX_FRAMES],
        native=places(fact),
        kernel=fact.kernel[:MAX_FRAMES],
        cut=is_cut(fact, flags),
        holder=key.holder,
        blocked=key.blocked,
        work=fact.work,
        hint=fact.hint,
    )


def is_cut(fact: StackFact, flags: int) -> bool:
    """Return whether there are more frames than those kept. *flags* as of ``cpu_sample``."""
    if fact.python:
        return bool(flags & _PYTHON_CUT) or len(fact.python) > MAX_FRAMES
    return bool((flags | fact.flags) & _NATIVE_CUT) or len(fact.native) > MAX_FRAMES


def places(fact: StackFact) -> list[str]:
    """Return the program's frames: of a thread that executes Python those that the innermost of its frames called.

    Between them and Python stands `MISSING` where no frame of the interpreter's evaluation was found below them.
    """
    if not fact.python:
        return fact.native[:MAX_FRAMES]
    called: list[str] = []
    for frame in fact.native:
        if _EVALUATES.match(frame):
            while called and _INTERPRETER.fullmatch(called[-1]):
                called.pop()
            return called[:MAX_FRAMES]
        called.append(frame)
    # Without it, what lies below the first frame of the interpreter is the interpreter, or not to be relied on.
    inner = next((i for i, frame in enumerate(called) if _INTERPRETER.fullmatch(frame)), len(called))
    return [*called[: min(inner, MAX_FRAMES)], MISSING] if inner else []
