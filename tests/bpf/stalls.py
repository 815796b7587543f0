"""Runs stack_work.py under an interpreter and holds its samples against the interpreter's own dumps."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from whyspan.code.stacks import Stacks
from whyspan.model import StackFact
from whyspan.text import clean
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Schema

SCRIPT = Path(__file__).with_name("stack_work.py")
#: How often samples are taken here: often enough for a hundred of each stall in a quarter of a second.
HZ = 499
STALLS = 31
_DEEPER = 2
_MAX_CHARS = 240  # of a name: whyspan/code/codeobjects.py


class Sample(NamedTuple):
    """One of a thread, as the process knows it, with its stack; None where it did not arrive."""

    ts_ns: int
    tid: int
    aux: int
    stack: StackFact | None


class Ran(NamedTuple):
    """What a run brought: its samples, what the script told of its stalls, and what was found of the interpreter."""

    samples: list[Sample]
    told: list[dict[str, Any]]
    version: tuple[int, int]


class Judged(NamedTuple):
    """Samples in stalls: how many there were, how many were right, what was wrong, and what had no name."""

    samples: int
    right: int
    wrong: list[str]
    unnamed: Counter[str]
    by_stall: Counter[str]


class Sampled:
    """A process whose threads are sampled, and the names of what they were in."""

    def __init__(self, found: Found, process: subprocess.Popen[str], hz: int = HZ) -> None:
        probe = found.probe
        hooks = tuple(dataclasses.replace(h, hz=hz) for h in probe.hooks)
        self.session = Session([Found(dataclasses.replace(probe, hooks=hooks), found.object_path)], 1 << 20)
        try:
            self.session.attach()
            assert self.session.probes[0].attached, self.session.probes[0].state
        except BaseException:
            self.session.close()
            raise
        self.process = process
        self.stacks = Stacks(self.session.maps)
        self._tgids: list[int] = []
        self._schema, self._rows = Schema(self.session.event_types()), RowBuffer()
        self._facts: dict[int, StackFact] = {}
        self._seen: list[tuple[int, int, int, int]] = []
        self._own: dict[int, int] = {}

    def follow(self, *tgids: int) -> None:
        """Watch these processes, and look for their interpreters."""
        self._tgids += tgids
        self.stacks.follow(self._tgids, time.monotonic())
        for tgid in tgids:
            self.session.maps.watch(tgid, 0)

    def problem(self, tgid: int) -> str:
        """Why the interpreter's frames cannot be walked; empty when they can."""
        return self.stacks.interpreters.found[tgid].problem

    def drain(self) -> None:
        """Take what has arrived."""
        for ring in self.session.maps.rings:
            ring.drain(self._rows)
        self._facts |= {f.id: f for f in self.stacks.take()}
        for row in self._schema.select(self._rows.take(), "cpu_sample"):
            ts, tid, aux, stack = (int(row[k]) for k in ("ts_ns", "tid", "aux", "stack"))
            self._seen.append((ts, tid, aux, stack))
            if tid not in self._own:
                self._own[tid] = _own_tid(int(row["tgid"]), tid)

    def samples(self) -> list[Sample]:
        """Return all that were taken."""
        return [Sample(ts, self._own[tid], aux, self._facts.get(s)) for ts, tid, aux, s in self._seen]


def _own_tid(tgid: int, tid: int) -> int:
    """Return a thread's number in its own PID namespace; 0 when it is gone."""
    try:
        status = Path(f"/proc/{tgid}/task/{tid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^NSpid:.*\t(\d+)$", status, re.M)
    return int(found[1]) if found else tid


@contextmanager
def sampled(
    found: Found, command: Sequence[str], hz: int = HZ, ready: str = "ready", child: bool = False
) -> Iterator[Sampled]:
    """Start a command, wait until it says that it is ready, and sample it, or its only child, till the end."""
    process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    one, tgid = None, process.pid
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{ready}\n", f"{command} did not start"
        if child:
            (tgid,) = map(int, Path(f"/proc/{tgid}/task/{tgid}/children").read_text().split())
        one = Sampled(found, process, hz)
        one.follow(tgid)
        yield one
    finally:
        if tgid != process.pid:
            os.kill(tgid, signal.SIGKILL)
        process.kill()
        process.communicate()
        if one is not None:
            one.session.close()


def run(found: Found, command: Sequence[str], seconds: float, *, child: bool = False) -> Ran:
    """Run the script by a command that lacks only its argument; with *child* its process is the command's child.

    Needs root. A Python whose frames cannot be walked fails the test with the reason that was found.
    """
    with sampled(found, [*command, str(seconds)], child=child) as one:
        (tgid,) = one.stacks.interpreters.found
        assert not one.problem(tgid), one.problem(tgid)
        told: list[dict[str, Any]] = []

        def read() -> None:
            for line in one.process.stdout or ():
                if line == "end\n":
                    return
                told.append(json.loads(line))

        reader = threading.Thread(target=read)
        assert one.process.stdin is not None
        one.process.stdin.write("\n")
        one.process.stdin.flush()
        reader.start()
        while reader.is_alive():
            reader.join(0.05)
            one.drain()
        one.drain()
        return Ran(one.samples(), told, one.stacks.interpreters.found[tgid].version)


def judge(samples: Sequence[Sample], told: Sequence[dict[str, Any]]) -> Judged:
    """Hold each sample that was taken in a stall, of whoever stalled, against what the interpreter said of it."""
    right, total = 0, 0
    wrong: list[str] = []
    unnamed, by_stall = Counter[str](), Counter[str]()
    for stall in told:
        callers = [(clean(f, _MAX_CHARS), clean(file, _MAX_CHARS), n) for f, file, n in stall["callers"]]
        for s in samples:
            if not in_stall(s, stall):
                continue
            total += 1
            by_stall[stall["name"]] += 1
            frames = [(f.function, f.file, f.line) for f in s.stack.python] if s.stack else []
            if not frames or not all(name and line for name, _, line in frames):
                unnamed[stall["name"]] += 1
            elif possible(frames, callers, stall, bool(s.aux & _DEEPER)):
                right += 1
            else:
                wrong.append(f"{stall['name']}: {frames[:3]} ... {frames[-2:]} and not {callers[:2]}")
    return Judged(total, right, wrong, unnamed, by_stall)


def hold(ran: Ran) -> Judged:
    """Assert that what was sampled is what the interpreter itself said, and nothing else."""
    assert len(ran.told) == STALLS
    judged = judge(ran.samples, ran.told)
    assert {t["name"] for t in ran.told} - judged.by_stall.keys() == set(), judged.by_stall
    assert judged.wrong == [], judged.wrong[:3]
    # Code that was executed once may be gone before it is read; then it has no name.
    gone = sum(n for name, n in judged.unnamed.items() if name.startswith("made"))
    assert judged.right >= 0.99 * (judged.samples - gone), judged.unnamed
    deep = [
        s.aux & _DEEPER
        for t in ran.told
        for s in ran.samples
        if in_stall(s, t) and t["name"] == "deep recursion"
    ]
    assert all(deep), "more frames than fit, and not said"
    return judged


def in_stall(sample: Sample, stall: dict[str, Any]) -> bool:
    """Whether a sample was taken of the thread that stalled, while it did."""
    return bool(sample.tid == stall["tid"] and stall["from_ns"] <= sample.ts_ns < stall["until_ns"])


def possible(
    frames: list[tuple[str, str, int]],
    callers: list[tuple[str, str, int]],
    stall: dict[str, Any],
    deeper: bool,
) -> bool:
    """Whether a stack is one that there can have been."""
    inner, outer = len(frames) - len(callers) - 1, callers
    if deeper:
        inner, outer = 0, callers[: len(frames) - 1]
    if inner < 0 or frames[inner + 1 :] != outer or frames[inner][0] != stall["function"]:
        return False
    if inner == 0:
        first, last = stall["lines"]
        return bool(first <= frames[0][2] <= last)
    # Functions that call each other: the innermost is anywhere in itself, each other one where it calls the next.
    calls = {(caller, line, callee) for caller, line, callee in stall.get("calls", ())}
    first, last = stall.get("functions", {}).get(frames[0][0], (1, 0))
    pairs = zip(frames[1 : inner + 1], frames[:inner], strict=True)
    return first <= frames[0][2] <= last and all((o[0], o[2], i[0]) in calls for o, i in pairs)
