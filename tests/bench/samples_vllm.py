"""The samplers on a real vLLM server under load: run time of the probes, and what naming their stacks costs.

The probes' run time is measured within the whole agent, at the default rate, on all threads of a saturated server. What
reading and naming the stacks costs is the CPU time of just that, in this process, at the agent's interval: the agent's
own CPU with and without samplers differs by less than it does from one run to the next.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.bench import cost
from tests.bench.ports import free_port
from tests.bench.samples import Bench
from tests.bench.vllm_cost import CLIENTS, OTHER_CPU, WORKER_CPU, Load, direct, tell
from tests.engine import vllm

SAMPLERS = ("samples", "waits", "snapshots")
SECONDS = 30.0
TARGET = 0.005
#: As the probe and the collector have them by default.
HZ, INTERVAL_S = 49, 0.5
#: What is mapped and called nearly always is known after that; it is paid once.
LEARN_S = 20.0


def run(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each sampler, and one for all of them with what they cost the agent."""
    directory = directory / "samples-vllm"
    directory.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {OTHER_CPU})
    ordinary = cost.CONFIG
    with (directory / "vllm.log").open("wb") as log:
        server = vllm.start(free_port(), stdout=log, stderr=subprocess.STDOUT)
        try:
            server.wait_ready(print)
            server.pin({WORKER_CPU}, {OTHER_CPU})
            # Nothing is shed here, whatever it costs.
            cost.CONFIG = f"{ordinary}[collector]\nbudget_core_ratio = 1.0\nbudget_target_ratio = 1.0\n"
            whole = direct(directory, server, ("--closed", CLIENTS), SECONDS)
            tell("saturation", whole, print)
            naming = name_stacks(directory, server)
        finally:
            cost.CONFIG = ordinary
            server.stop()
    cores = whole["server_cores"]
    rows: list[dict[str, Any]] = []
    for name in SAMPLERS:
        if name in whole["probes"]:
            one = whole["probes"][name]
            rows.append({"what": name, **one, "of_server": one["cores"] / cores})
    rows.append({"what": "reading and naming stacks", "cores": naming, "of_server": naming / cores})
    both = sum(row["cores"] for row in rows)
    rows.append({"what": f"together (target {TARGET:.1%})", "cores": both, "of_server": both / cores})
    return rows


def name_stacks(directory: Path, server: vllm.Server) -> float:
    """Return the part of a core that reading samples and naming their stacks takes under the same load.

    Symbols of libraries are looked up by a process of its own, which is not in it.
    """
    load = Load(server.port, directory / "client.jsonl", "--closed", CLIENTS)
    bench = Bench("samples", hz=HZ)
    try:
        time.sleep(3)
        for tgid in server.pids():
            bench.stacks.follow(server.pids(), time.monotonic())
            bench.session.maps.watch(tgid, 0)
        spent, began = 0, time.monotonic()
        while time.monotonic() - began < SECONDS + LEARN_S:
            time.sleep(INTERVAL_S)
            if time.monotonic() - began < LEARN_S:
                bench.drain("cpu_sample")
                bench.stacks.take()
                continue
            before = time.thread_time_ns()
            bench.drain("cpu_sample")
            bench.stacks.take()
            spent += time.thread_time_ns() - before
        return spent / 1e9 / (time.monotonic() - began - LEARN_S)
    finally:
        bench.session.close()
        load.stop()
