"""What the plugin costs a real vLLM: its marks in a closed loop, times what each costs the process that makes it.

Paired throughput cannot show half a percent on two CPUs. The unit costs are measured in the same run: making a body
and sending it with the counter raised (``tests.bench.marker``), and the trap into the probe
(``tests.bench.marker_watched``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from whyspan.marks import Step
from whyspan.recording import Reader

from tests.bench import marker_watched
from tests.bench.marker import STEP, STEP_MORE, USUAL
from tests.bench.ports import free_port
from tests.bench.vllm_cost import CLIENTS, OTHER_CPU, WORKER_CPU, Load
from tests.demo.procs import cpu_ns
from tests.engine import inproc, vllm
from tests.engine.watch import Watch

WINDOW_S = 20.0
_WATCHED, _UNWATCHED = "marker_ns_watched_100b", "marker_ns_unwatched_100b"


def run(directory: Path) -> dict[str, Any]:
    """Return the plugin's direct cost as a share of the server's CPU, and what it is made of."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.marker", "--json"], check=True, capture_output=True, text=True
    )
    unit: dict[str, float] = json.loads(done.stdout)
    watched = marker_watched.run(directory)
    with (directory / "plugin-vllm.log").open("wb") as log:
        server = vllm.start(
            free_port(),
            env=inproc.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            cpus={WORKER_CPU, OTHER_CPU},
        )
        try:
            server.wait_ready(print)
            server.pin({WORKER_CPU}, {OTHER_CPU})
            marks, cores = _loaded(server, directory / f"plugin-{time.monotonic_ns()}")
        finally:
            server.stop()
    steps = [m.body for m in marks if isinstance(m.body, Step)]
    kinds = Counter(type(m.body).__name__ for m in marks)
    trap = watched[_WATCHED] - watched[_UNWATCHED]
    made = sum(unit[STEP] + unit[STEP_MORE] * max(len(s.decodes) - 1, 0) for s in steps)
    made += unit[USUAL] * (len(marks) - len(steps))
    ns = made + trap * len(marks)
    ratio = ns / (cores * WINDOW_S * 1e9)
    per_s = {kind: round(n / WINDOW_S, 1) for kind, n in kinds.most_common()}
    print(
        f"  {len(marks) / WINDOW_S:.0f} marks/s {per_s}, server {cores:.2f} cores, {ns / WINDOW_S / 1e6:.2f} ms/s"
    )
    return watched | {
        "plugin_direct_cost_ratio": ratio,
        "plugin_marks_per_s": len(marks) / WINDOW_S,
        "plugin_marks": per_s,
    }


def _loaded(server: vllm.Server, folder: Path) -> tuple[list[Any], float]:
    """Return the marks of a window of a closed loop, and the cores that the server used in it."""
    more = f'[collector]\nrecord = "{folder}.rec"\n'
    with Watch(folder, server.pid, more, {OTHER_CPU}):
        load = Load(server.port, folder.with_suffix(".jsonl"), "--closed", CLIENTS)
        try:
            time.sleep(5)
            begin_ns, before = time.monotonic_ns(), sum(cpu_ns(pid) for pid in server.pids())
            time.sleep(WINDOW_S)
            end_ns, after = time.monotonic_ns(), sum(cpu_ns(pid) for pid in server.pids())
        finally:
            load.stop()
    reader = Reader(folder.with_name(f"{folder.name}.rec"))
    marks = [m for b in reader.batches() for m in b.marks if begin_ns <= m.ts_ns < end_ns and m.tid]
    reader.close()
    return marks, (after - before) / (end_ns - begin_ns)
