"""Nanoseconds per mark of the real marker, unwatched and watched: ``python -m tests.bench.marker_watched`` (root).

The child marks in bursts that the ring holds, and waits for the reader between them: nothing is lost, or the run fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whyspan_probes.loader import Session
from whyspan_probes.registry import discover

from tests import build_inproc
from tests.demo.procs import ROOT

PAYLOADS = (100, 1024)
BURST, BURSTS = 211, 101
#: Says how long each mark of a burst took, in ns, on the mean.
CHILD = """
import os, sys, time
from whyspan_inproc import _marker
payload, burst = b"x" * int(sys.argv[1]), int(sys.argv[2])
mark, clock = _marker.mark, time.perf_counter_ns
print(flush=True)
for _ in sys.stdin:
    begin = clock()
    for _ in range(burst):
        mark(4242, payload)
    print((clock() - begin) / burst, flush=True)
"""


def _run(session: Session, package: Path, size: int, *, attached: bool, watched: bool) -> dict[str, float]:
    """Return median and P95 over the bursts; the last CPU is the child's."""
    env = {**os.environ, "PYTHONPATH": str(package)}
    cpu = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        ["taskset", "-c", str(cpu), sys.executable, "-c", CHILD, str(size), str(BURST)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        if attached:
            session.follow([child.pid], time.monotonic())
            state = session.probes[0].state
            if state.state != "attached":
                raise RuntimeError(f"{state.state}: {state.reason}")
        if watched:
            session.maps.watch(child.pid, 0)
        received, each = 0, []
        for _ in range(BURSTS):
            child.stdin.write("\n")
            child.stdin.flush()
            each.append(float(child.stdout.readline()))
            received += len(session.maps.marks.drain())
        child.stdin.close()
        child.wait()
    session.follow([], time.monotonic())
    session.maps.unwatch(child.pid)
    if received != BURST * BURSTS * watched:
        raise RuntimeError(f"{received} of {BURST * BURSTS} marks arrived")
    return {"median": statistics.median(each), "p95": statistics.quantiles(each, n=20)[-1]}


def run(directory: Path) -> dict[str, Any]:
    """Return ns per mark: with nobody there, in a process that is not watched beside one that is, and watched."""
    package = directory / "marker"
    (package / "whyspan_inproc").mkdir(parents=True, exist_ok=True)
    (package / "whyspan_inproc/__init__.py").touch()
    build_inproc.build(package / "whyspan_inproc")
    session = Session([f for f in discover() if f.probe.name == "marker"], 1 << 16)
    try:
        session.attach()
        out: dict[str, Any] = {}
        for size in PAYLOADS:
            for name, attached, watched in (
                ("unwatched", False, False),
                ("shared", True, False),
                ("watched", True, True),
            ):
                figures = _run(session, package, size, attached=attached, watched=watched)
                out[f"marker_ns_{name}_{size}b"] = round(figures["median"], 1)
                out[f"marker_ns_{name}_{size}b_p95"] = round(figures["p95"], 1)
        return out
    finally:
        session.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        print(json.dumps(run(Path(folder)), indent=2))
