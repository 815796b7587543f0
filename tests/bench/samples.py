"""What a sample and a stack of a blocked thread cost, by the kernel's own count of the programs' run time.

``python -m tests.bench.samples [--part depth|waits|beside|vllm ...] [--json FILE]``: root, a quiet machine of two CPUs.

* depth: ns per sample of a thread with so many frames of Python, or of C with frame pointers, below it.
* waits: ns per thread looked at, and per stack taken of one that is blocked.
* beside: the overhead on a program and the error rate, beside py-spy and austin at the same rate.
* vllm: both probes on a real vLLM server under load, and what naming their stacks costs the agent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whyspan.code.stacks import Stacks
from whyspan_probes import program_stats
from whyspan_probes.loader import Session
from whyspan_probes.program_stats import RunStats, StatsWindow
from whyspan_probes.registry import Found, discover
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Schema

from tests import tracefs
from tests.bench.samples_programs import BUSY, DEEP, NATIVE, WAITING

HZ = 999
WINDOW_S = 2.0
PYTHON_DEPTHS = (2, 5, 10, 20, 50, 100, 128, 200)
NATIVE_DEPTHS = (1, 10, 30, 64, 128)
BLOCKED = (1, 100, 1000)
TARGET_CPU = 1


@contextmanager
def running(*command: str, cpu: int = TARGET_CPU) -> Iterator[int]:
    """Start a program on one CPU that says when it is ready; it is killed at the end."""
    process = subprocess.Popen(
        ["taskset", "-c", str(cpu), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", command
        yield process.pid
    finally:
        process.kill()
        process.communicate()


class Bench:
    """One probe, attached, with its run time and what it sends."""

    def __init__(self, name: str, config: dict[str, int] | None = None, hz: int = HZ) -> None:
        (found,) = (f for f in discover() if f.probe.name == name)
        hooks = tuple(dataclasses.replace(h, hz=hz) if h.hz else h for h in found.probe.hooks)
        probe = dataclasses.replace(found.probe, hooks=hooks)
        self.session = Session([Found(probe, found.object_path)], 4 << 20)
        self.session.attach(config={name: config or {}})
        self.loaded = self.session.probes[0]
        if not self.loaded.attached:
            raise SystemExit(f"{name}: {self.loaded.state.reason}")
        self.stacks = Stacks(self.session.maps)
        self._schema, self._rows = Schema(self.session.event_types()), RowBuffer()

    def watch(self, tgid: int) -> None:
        """Watch a process, and look for its interpreter."""
        self.stacks.follow([tgid], time.monotonic())
        self.session.maps.watch(tgid, 0)

    def drain(self, kind: str) -> Any:
        """Return the rows that have arrived."""
        for ring in self.session.maps.rings:
            ring.drain(self._rows)
        return self._schema.select(self._rows.take(), kind)

    def ran(self) -> RunStats:
        """Return the run time of its program so far."""
        (stats,) = (program_stats.read(fd) for fd in self.loaded._programs.values())
        return stats

    def window(self, seconds: float) -> tuple[int, int, int]:
        """Return (run time in ns, runs, samples) of a while."""
        self.drain("cpu_sample")
        stats = StatsWindow()
        try:
            before = self.ran()
            time.sleep(seconds)
            after = self.ran()
        finally:
            stats.close()
        return after.run_ns - before.run_ns, after.runs - before.runs, len(self.drain("cpu_sample"))


def per_sample(bench: Bench, unwatched_ns: float, command: Sequence[str]) -> dict[str, float]:
    """Sample one program; the ticks that hit others are taken off at what they cost."""
    with running(*command) as tgid:
        bench.watch(tgid)
        time.sleep(0.2)
        bench.stacks.take()
        ns, runs, samples = bench.window(WINDOW_S)
        frames = max((len(f.python) for f in bench.stacks.take()), default=0)
        bench.session.maps.unwatch(tgid)
    return {
        "samples": samples,
        "python_frames": frames,
        "ns_per_sample": (ns - max(runs - samples, 0) * unwatched_ns) / max(samples, 1),
    }


def depth(directory: Path) -> list[dict[str, Any]]:
    """ns per sample by depth."""
    source, program = directory / "deep.c", directory / "deep"
    source.write_text(NATIVE)
    subprocess.run(
        [
            "clang",
            "-O1",
            "-fno-omit-frame-pointer",
            "-fno-optimize-sibling-calls",
            "-o",
            str(program),
            str(source),
        ],
        check=True,
    )
    bench, rows = Bench("samples"), []
    try:
        with running(sys.executable, "-c", DEEP, "5"):
            ns, runs, _ = bench.window(WINDOW_S)
        unwatched = ns / max(runs, 1)
        rows.append({"what": "a thread of no watched process", "samples": runs, "ns_per_sample": unwatched})
        for n in NATIVE_DEPTHS:
            rows.append({"what": f"C, {n} frames", **per_sample(bench, unwatched, [str(program), str(n)])})
        for n in PYTHON_DEPTHS:
            command = [sys.executable, "-c", DEEP, str(n)]
            rows.append({"what": f"Python, {n} frames", **per_sample(bench, unwatched, command)})
        busy = per_sample(bench, unwatched, [sys.executable, "-c", BUSY])
        rows.append({"what": "Python, 2 to 13 frames, another stack each time", **busy})
    finally:
        bench.session.close()
    return rows


def waits(_directory: Path) -> list[dict[str, Any]]:
    """ns per thread looked at, and per stack."""
    rows = []
    for threads in BLOCKED:
        for frames in (5, 50):
            bench = Bench("waits", {"min_ns": 0})
            try:
                with running(sys.executable, "-c", WAITING, str(threads), str(frames)) as tgid:
                    bench.watch(tgid)
                    spent = []
                    stats = StatsWindow()
                    try:
                        for _ in range(3):  # seen first; told; told already
                            before, began = bench.ran(), time.thread_time_ns()
                            bench.loaded.walk("look", [tgid])
                            after = bench.ran()
                            spent.append((after.run_ns - before.run_ns, time.thread_time_ns() - began))
                    finally:
                        stats.close()
                    told = len(bench.drain("wait_stack"))
            finally:
                bench.session.close()
            rows.append(
                {
                    "what": f"{threads} threads blocked, {frames} frames of Python and more",
                    "told": told,
                    "ns_per_thread": spent[2][0] / (threads + 1),
                    "cpu_ns_per_look": spent[2][1],
                    "ns_per_stack": (spent[1][0] - spent[2][0]) / max(told, 1),
                }
            )
    return rows


def beside(directory: Path) -> list[dict[str, Any]]:
    """Overhead and errors, beside other samplers."""
    from tests.bench.samples_beside import run

    return run(directory)


def vllm(directory: Path) -> list[dict[str, Any]]:
    """The probes on a real server."""
    from tests.bench.samples_vllm import run

    return run(directory)


PARTS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "depth": depth,
    "waits": waits,
    "beside": beside,
    "vllm": vllm,
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as text, columns by name."""
    names = list(dict.fromkeys(k for row in rows for k in row))
    cells = [names, *([_cell(row.get(n)) for n in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return "" if value is None else str(value)


def main() -> int:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--part", choices=sorted(PARTS), action="append")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("needs root", file=sys.stderr)
        return 2
    directory = Path("build/bench")
    directory.mkdir(parents=True, exist_ok=True)
    out: dict[str, Any] = {"kernel": os.uname().release, "cpus": os.cpu_count()}
    with tracefs.mounted():
        for name in args.part or PARTS:
            out[name] = PARTS[name](directory)
            print(f"{name}: {PARTS[name].__doc__}\n{table(out[name])}\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(out, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
