"""What watching costs malloc: pairs of malloc and free a second in a watched process, beside the same unwatched.

All probes are attached throughout; each round has the process unwatched, watched, watched, unwatched (ABBA), so that
what drifts on the machine falls on both. Beside it a round with uprobes on malloc and free that only count.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from whyspan_probes import libraries, symbols
from whyspan_probes.loader import Session
from whyspan_probes.registry import discover

from tests import tracefs
from tests.demo.procs import ROOT

ROUNDS = 24
SLICE_MS = 250
TRACING = Path("/sys/kernel/tracing")
HERE = Path(__file__).parent


class Loop:
    """The program, on the last CPU."""

    def __init__(self, directory: Path) -> None:
        program = directory / "malloc"
        subprocess.run(
            ["clang", "-O2", "-fno-builtin", "-o", str(program), str(HERE / "malloc.c")], check=True
        )
        cpu = str(max(os.sched_getaffinity(0)))
        self.process = subprocess.Popen(
            ["taskset", "-c", cpu, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ns(1)  # taskset is the program by now

    def ns(self, ms: int) -> float:
        """Return the nanoseconds that a pair takes, on the mean of so many ms."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{ms}\n")
        self.process.stdin.flush()
        pairs, took = map(int, self.process.stdout.readline().split())
        return took / pairs

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def run(directory: Path) -> dict[str, Any]:
    """Return ns per pair and the ratio of pairs a second, watched against unwatched."""
    directory.mkdir(parents=True, exist_ok=True)
    loop = Loop(directory)
    session = Session(discover(), 8 << 20)
    try:
        session.attach()
        tgid = loop.process.pid
        ratios, plain, watched = [], [], []
        for _ in range(ROUNDS):
            a1 = loop.ns(SLICE_MS)
            session.maps.watch(tgid, 0)
            session.follow([tgid], time.monotonic())
            b1, b2 = loop.ns(SLICE_MS), loop.ns(SLICE_MS)
            session.follow([], time.monotonic())
            session.maps.unwatch(tgid)
            a2 = loop.ns(SLICE_MS)
            ratios.append((a1 + a2) / (b1 + b2))
            plain += [a1, a2]
            watched += [b1, b2]
    finally:
        session.close()
    try:
        with_uprobes = traced(loop)
    finally:
        loop.close()
    return {
        "malloc_watched_ratio": round(statistics.median(ratios), 4),
        "malloc_ns_plain": round(statistics.median(plain), 2),
        "malloc_ns_watched": round(statistics.median(watched), 2),
        "malloc_ns_uprobes": round(with_uprobes, 1),
        "malloc_uprobes_times": round(with_uprobes / statistics.median(plain), 1),
    }


def _define(line: str) -> None:
    fd = os.open(TRACING / "uprobe_events", os.O_WRONLY | os.O_APPEND)  # open() would seek, which it refuses
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def traced(loop: Loop) -> float:
    """Return ns per pair with two uprobes, by the kernel's own tracer."""
    (libc,) = libraries.find(loop.process.pid, re.compile(r"/libc\.so\.6$"))
    with open(libc.open_path, "rb") as f:
        found = symbols.find(f.fileno(), ["malloc", "free"])
    names = []
    try:
        for name, symbol in found.items():
            _define(f"p:whyspan_bench/{name} {libc.path}:{symbol.offset:#x}")
            names.append(name)
        (TRACING / "events/whyspan_bench/enable").write_text("1")
        return loop.ns(SLICE_MS * 4)
    finally:
        if names:
            (TRACING / "events/whyspan_bench/enable").write_text("0")
            for name in names:
                _define(f"-:whyspan_bench/{name}")


if __name__ == "__main__":
    with tracefs.mounted():
        print(json.dumps(run(ROOT / "build" / "bench"), indent=2))
