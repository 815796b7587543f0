"""The sampler beside py-spy and austin: what each costs a program of fixed work, and how often each is wrong.

Overhead: one process works through units of fixed work, on a CPU of its own; in turns nobody looks at it, or one of
the three does, from the other CPU. Errors: each samples a run of stack_work.py of its own, and its stacks are held
against what the interpreter said of each stall, by function, file and line, without regard to when. What is between
stalls counts against all alike.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bench.samples_tools import Frame, command, stacks
from tests.bpf.stalls import SCRIPT, possible

RATES = (49, 999)
ROUNDS, WINDOW_S, SETTLE_S = 8, 3.0, 1.5
STALL_S = 1.0
TARGET_CPU, OTHER_CPU = 1, 0
_CHARS = 200  # of a name; longer ones are cut, and said to be

WORK = """
import sys, time
def unit(n):
    return unit(n - 1) if n else sum(i ^ 3 for i in range(2000))
print("ready", flush=True)
for line in sys.stdin:
    units, began, end = 0, time.monotonic_ns(), time.monotonic_ns() + int(line) * 1_000_000
    while time.monotonic_ns() < end:
        unit(10)
        units += 1
    print(units, time.monotonic_ns() - began, flush=True)
"""


def _last(name: object) -> str:
    return str(name).rpartition(".")[2][:_CHARS]


def _plain(frame: Sequence[Any]) -> Frame:
    """A frame as all tools can tell it: the function's own name, the file's own name, the line."""
    return _last(frame[0]), os.path.basename(str(frame[1]))[:_CHARS], int(frame[2])


def errors(tool: str, hz: int, directory: Path) -> dict[str, Any]:
    """Sample a run of the script; return how many stacks the tool itself calls broken or nameless, and how many are
    none that there can have been."""
    out = directory / f"stacks.{tool}"
    out.unlink(missing_ok=True)
    script = subprocess.Popen(
        ["taskset", "-c", str(TARGET_CPU), sys.executable, str(SCRIPT), str(STALL_S), "tame"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    told: list[dict[str, Any]] = []
    try:
        assert script.stdin is not None and script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        sampler = subprocess.Popen(
            ["taskset", "-c", str(OTHER_CPU), *command(tool, script.pid, hz, 300, out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(SETTLE_S)
        script.stdin.write("\n")
        script.stdin.flush()
        for line in script.stdout:
            if line == "end\n":
                break
            told.append(json.loads(line))
        sampler.send_signal(2)  # as Ctrl-C would: all of them write what they have
        try:
            sampler.wait(20)
        except subprocess.TimeoutExpired:
            sampler.kill()
            sampler.wait()
    finally:
        script.kill()
        script.communicate()
    stalls = [_plainly(t) for t in told]
    right, failed, total, wrong = 0, 0, 0, Counter[str]()
    for stack, times in stacks(tool, out):
        frames = [_plain(f) for f in stack.frames]
        if _waits(frames):
            continue
        total += times
        if stack.broken or not all(name and n for name, _, n in frames):
            failed += times
        elif any(possible(frames, s["callers"], s, stack.deeper) for s in stalls):
            right += times
        else:
            wrong[" < ".join(f"{f}:{n}" for f, _, n in frames[:3])] += times
    return {
        "what": f"{tool}, {hz} Hz",
        "samples": total,
        "failed": failed,
        "wrong": wrong.total(),
        "share_failed": failed / max(total, 1),
        "share_wrong": wrong.total() / max(total, 1),
        "most_often": wrong.most_common(1)[0][0][:60] if wrong else "",
    }


def _waits(frames: list[Frame]) -> bool:
    """Whether a stack is of the script's own waiting: for its input, or for its threads."""
    names = {f for f, _, _ in frames}
    return (
        not names
        or frames[0][0] in ("main", "<module>")
        or bool(names & {"join", "_wait_for_tstate_lock", "start"})
    )


def _plainly(stall: dict[str, Any]) -> dict[str, Any]:
    return {
        **stall,
        "callers": [_plain(c) for c in stall["callers"]],
        "functions": {_last(k): v for k, v in stall.get("functions", {}).items()},
        "calls": [(_last(a), n, _last(b)) for a, n, b in stall.get("calls", ())],
    }


class Worker:
    """The program of fixed work."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["taskset", "-c", str(TARGET_CPU), sys.executable, "-c", WORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def ns(self, seconds: float) -> float:
        """Return the ns that a unit takes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{int(seconds * 1000)}\n")
        self.process.stdin.flush()
        units, took = map(int, self.process.stdout.readline().split())
        return took / units


def overhead(hz: int, directory: Path) -> list[dict[str, Any]]:
    """Return the slowdown of the program by each tool, and the CPU that the tool itself used meanwhile."""
    worker = Worker()
    kinds = ("nobody", "whyspan", "py-spy", "austin")
    took: dict[str, list[float]] = {k: [] for k in kinds}
    used: dict[str, list[float]] = {k: [] for k in kinds}
    try:
        for _ in range(ROUNDS):
            for kind in random.sample(kinds, len(kinds)):
                sampler = None
                if kind != "nobody":
                    line = command(
                        kind, worker.process.pid, hz, SETTLE_S + WINDOW_S + 2, directory / f"o.{kind}"
                    )
                    sampler = subprocess.Popen(
                        ["taskset", "-c", str(OTHER_CPU), *line],
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                worker.ns(SETTLE_S)
                before = _cpu_s(sampler)
                took[kind].append(worker.ns(WINDOW_S))
                used[kind].append(_cpu_s(sampler) - before)
                if sampler is not None:
                    sampler.kill()
                    sampler.wait()
    finally:
        worker.process.kill()
        worker.process.communicate()
    plain = statistics.median(took["nobody"])
    return [
        {
            "what": f"{k}, {hz} Hz",
            "ns_per_unit": statistics.median(took[k]),
            "slower": statistics.median(took[k]) / plain - 1,
            "spread": (max(took[k]) - min(took[k])) / plain,
            "own_cores": statistics.median(used[k]) / WINDOW_S,
        }
        for k in kinds
    ]


def _cpu_s(process: subprocess.Popen[bytes] | None) -> float:
    if process is None:
        return 0.0
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def run(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each tool and rate: errors and overhead."""
    rows: list[dict[str, Any]] = []
    for hz in RATES:
        found = {row["what"]: row for row in overhead(hz, directory)}
        for tool in ("whyspan", "py-spy", "austin"):
            row = errors(tool, hz, directory)
            found[row["what"]] |= row
        rows += found.values()
    return rows
