"""What watching costs: CPU of probes and agent against the server's, memory, start-up, and delay of a verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from whyspan_probes.program_stats import StatsWindow
from whyspan_probes.registry import discover

from tests.bench.ports import free_port
from tests.demo.procs import cpu_ns, favour, pin, python, spawn, stop, wait_http

SERVER_CPU, OTHER_CPU = 1, 0
_NAME_BYTES = 15  # what the kernel keeps of a program's name
STATS_S = 5.0
_PSS_EVERY_S = 10.0

CONFIG = """\
[targets]
auto = false
match = [{{ pid = {pid}, service = "bench" }}]

[slo]
e2e_ms = {e2e_ms}

[run]
state_dir = "{state}"
"""


def bpf_runs() -> dict[str, tuple[int, int]]:
    """Return (run time in ns, runs) of each probe's programs so far, as counted while statistics are on."""
    shown = subprocess.run(["bpftool", "prog", "show", "-j"], capture_output=True, check=True).stdout
    programs, out = json.loads(shown), {}
    for found in discover():
        names = {name[:_NAME_BYTES] for name in found.probe.programs()}
        ours = [p for p in programs if p.get("name", "") in names]
        out[found.probe.name] = (
            sum(p.get("run_time_ns", 0) for p in ours),
            sum(p.get("run_cnt", 0) for p in ours),
        )
    return out


def probe_costs(seconds: float = STATS_S) -> dict[str, Any]:
    """Measure the probes for *seconds*: cores, hits per second and ns per hit, in all and of each."""
    window = StatsWindow()
    try:
        before, began = bpf_runs(), time.monotonic()
        time.sleep(seconds)
        after, elapsed = bpf_runs(), time.monotonic() - began
    finally:
        window.close()
    # A program that was taken away since counts for nothing.
    ns = {p: max(after[p][0] - before[p][0], 0) for p in after}
    runs = {p: max(after[p][1] - before[p][1], 0) for p in after}
    return {
        "bpf_cores": sum(ns.values()) / elapsed / 1e9,
        "probe_hits_per_s": sum(runs.values()) / elapsed,
        "ns_per_hit": sum(ns.values()) / max(sum(runs.values()), 1),
        "probes": {
            p: {
                "hits_per_s": round(runs[p] / elapsed),
                "ns_per_hit": round(ns[p] / max(runs[p], 1)),
                "cores": ns[p] / elapsed / 1e9,
            }
            for p in sorted(ns, key=lambda p: (-ns[p], p))
        },
    }


class Agent:
    """One ``whyspan run`` with default settings, its start timed."""

    def __init__(
        self, directory: Path, pid: int, e2e_ms: float, cpus: set[int] | None = None, fresh: bool = True
    ) -> None:
        """Start it; *fresh* forgets what an earlier one in the same directory has learnt."""
        self.state = directory / "state"
        if fresh:
            shutil.rmtree(self.state, ignore_errors=True)
        config = directory / "whyspan.toml"
        config.write_text(CONFIG.format(pid=pid, e2e_ms=e2e_ms, state=self.state))
        self.log = directory / "agent.log"
        with self.log.open("wb") as log:
            began = time.monotonic()
            self.process = spawn(
                [str(Path(sys.executable).with_name("whyspan")), "run", "--config", str(config)],
                cpus or {OTHER_CPU},
                deadly=signal.SIGTERM,
                stdout=log,
                stderr=log,
            )
        favour(self.process)
        while "ready after" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() - began > 30:
                raise RuntimeError(f"the agent did not start: {self.log.read_text()[-500:]}")
            time.sleep(0.005)
        self.start_s = time.monotonic() - began

    def pin(self, cpus: set[int]) -> None:
        """Move every thread of it. It cannot be started beside a thread that spins: it might never get so far."""
        for process in self.processes():
            pin(process.pid, cpus)

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_ns(self) -> int:
        return sum(cpu_ns(p.pid) for p in self.processes())

    def pss_bytes(self) -> int:
        return sum(p.memory_full_info().pss for p in self.processes())


class Seen:
    """Notes when new findings appear in the store, by polling it as a reader would."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self.at: dict[str, float] = {}
        self._old: frozenset[str] = frozenset()
        self.poll()
        self._old = frozenset(self.at)  # no telling when these came
        self.at.clear()

    def poll(self) -> None:
        now = time.monotonic()
        for (trace_id,) in self._db.execute("SELECT trace_id FROM findings"):
            if trace_id not in self._old:
                self.at.setdefault(trace_id, now)


def start(directory: Path, runs: int = 5) -> dict[str, Any]:
    """Start the agent *runs* times on the idle machine, on all CPUs: from exec to all probes attached, warm."""
    directory.mkdir(parents=True, exist_ok=True)
    every_cpu = os.sched_getaffinity(0)
    times = []
    for _ in range(runs):
        agent = Agent(directory, os.getpid(), 0, every_cpu)
        times.append(agent.start_s)
        stop(agent.process)
    return {"start_s": statistics.median(times), "start_max_s": max(times)}


def run(
    directory: Path, *, all_slow: bool, rate: float = 50.0, tokens: int = 12, seconds: float = 30.0
) -> dict[str, Any]:
    """Run server, load and agent, and measure for *seconds* after a warm-up.

    Direct cost = (run time of the probes + CPU of all agent processes) / CPU of the server, over the same load. The
    probes' run time comes from a window of its own, since counting it slows them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    server = spawn(python("tests.demo.server", "--port", port), SERVER_CPU, stderr=subprocess.DEVNULL)
    load = agent = None
    try:
        wait_http(f"http://127.0.0.1:{port}/healthz", server)
        truth = directory / "client.jsonl"
        load = spawn(
            python("tests.demo.load", "--port", port, "--rate", rate, "--tokens", tokens, "--out", truth),
            OTHER_CPU,
        )
        time.sleep(2)
        agent = Agent(directory, server.pid, 1.0 if all_slow else 0)
        time.sleep(15)  # a baseline, and past the first measuring window of the governor
        seen = Seen(agent.state / "whyspan.db")
        pss, pss_due_s = 0, _PSS_EVERY_S
        server_0, agent_0, began = cpu_ns(server.pid), agent.cpu_ns(), time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds:
            time.sleep(0.05)
            seen.poll()
            if elapsed >= pss_due_s:
                pss_due_s += _PSS_EVERY_S
                pss = max(pss, agent.pss_bytes())
        server_cores = (cpu_ns(server.pid) - server_0) / elapsed / 1e9
        agent_cores = (agent.cpu_ns() - agent_0) / elapsed / 1e9
        costs = probe_costs()
    finally:
        for process in (agent.process if agent else None, load, server):
            if process:
                stop(process)
    ends = {r["trace_id"]: r["end_ns"] / 1e9 for r in map(json.loads, truth.read_text().splitlines())}
    delays = sorted(at - ends[t] for t, at in seen.at.items() if t in ends and at > ends[t])
    return {
        "direct_cost_ratio": (costs["bpf_cores"] + agent_cores) / server_cores,
        "server_cores": server_cores,
        "agent_cores": agent_cores,
        **costs,
        "requests_per_s": rate,
        "pss_mb": pss / 1e6,
        "verdict_s": delays[int(len(delays) * 0.99)] if delays else None,
        "verdict_median_s": statistics.median(delays) if delays else None,
        "findings": len(seen.at),
    }
