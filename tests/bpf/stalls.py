"""Runs stack_work.py under an interpreter and holds its samples against the interpreter's own dumps."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whyspan.code.stacks import Stacks
from whyspan.model import StackFact
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Schema

SCRIPT = Path(__file__).with_name("stack_work.py")
_DEEPER = 2
_ANSWER_S = 60.0


class Sample(NamedTuple):
    """One of a thread, with its stack; None where it did not arrive."""

    ts_ns: int
    tid: int
    aux: int
    stack: StackFact | None


class Judged(NamedTuple):
    """Samples in stalls: how many there were, how many were right, what was wrong, and what had no name."""

    samples: int
    right: int
    wrong: list[str]
    unnamed: Counter[str]
    by_stall: Counter[str]


def run(found: Found, command: Sequence[str], seconds: float) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Return the samples of a run of the script, and what it told of its stalls. Needs root."""
    session = Session([found], 1 << 20)
    process = subprocess.Popen(
        [*command, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        session.attach()
        assert session.probes[0].attached, session.probes[0].state
        stacks, schema, rows = Stacks(session.maps), Schema(session.event_types()), RowBuffer()
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        session.maps.watch(process.pid, 0)
        stacks.follow([process.pid], time.monotonic())
        interpreter = stacks.interpreters.found[process.pid]
        assert not interpreter.problem, interpreter.problem
        told: list[str] = []
        reader = threading.Thread(target=lambda: told.extend(process.stdout or ()))
        process.stdin.write("\n")
        process.stdin.flush()
        reader.start()
        facts: dict[int, StackFact] = {}
        samples: list[tuple[int, int, int, int]] = []
        ended = False
        while not ended:
            reader.join(0.25)
            ended = not reader.is_alive()
            for ring in session.maps.rings:
                ring.drain(rows)
            facts |= {f.id: f for f in stacks.take()}
            for row in schema.select(rows.take(), "cpu_sample"):
                samples.append((int(row["ts_ns"]), int(row["tid"]), int(row["aux"]), int(row["stack"])))
        return [Sample(ts, tid, aux, facts.get(s)) for ts, tid, aux, s in samples], [
            json.loads(t) for t in told
        ]
    finally:
        process.kill()
        process.communicate()
        session.close()


def judge(samples: Sequence[Sample], told: Sequence[dict[str, Any]]) -> Judged:
    """Hold each sample that was taken in a stall, of whoever stalled, against what the interpreter said of it."""
    right = 0
    wrong: list[str] = []
    unnamed, by_stall = Counter[str](), Counter[str]()
    total = 0
    for stall in told:
        for s in samples:
            if not stall["from_ns"] <= s.ts_ns < stall["until_ns"] or s.stack is None or not s.stack.python:
                continue
            if (
                s.stack.python[0].function == "Thread._wait_for_tstate_lock"
                or "join" in s.stack.python[0].function
            ):
                continue  # whoever waits for the thread that stalls
            total += 1
            by_stall[stall["name"]] += 1
            frames = [(f.function, f.file, f.line) for f in s.stack.python]
            callers = [tuple(c) for c in stall["callers"]]
            if any(not name for name, _, _ in frames):
                unnamed[stall["name"]] += 1
                continue
            first, last = stall["lines"]
            whole = frames[1:] == callers or (s.aux & _DEEPER and frames[1:] == callers[: len(frames) - 1])
            if frames[0][0] == stall["function"] and first <= frames[0][2] <= last and whole:
                right += 1
            else:
                wrong.append(f"{stall['name']}: {frames[:3]} and not {callers[:2]}")
    return Judged(total, right, wrong, unnamed, by_stall)
