"""What watching a real vLLM costs: direct cost, and throughput and latency with the agent against without.

Direct cost = (run time of the probes + CPU of all agent processes) / CPU of the server. The paired measurement runs a
closed loop with the agent on the worker's CPU, its worst place, in windows of 5 s in random ABBA order beside as many
A/A pairs: what differs there is the machine's noise. The latency is that of an open loop at half capacity.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.cost import Agent, probe_costs
from tests.bench.ports import free_port
from tests.demo.procs import cpu_ns, python, spawn, stop
from tests.engine import vllm

WORKER_CPU, OTHER_CPU = 1, 0
CLIENTS = 6
WINDOW_S = 5.0
SETTLE_S = 2.0
#: Learning what is usual takes at most so long here, and is over when the agent uses less than that of a core.
LEARN_S, LEARNT_CORES, LEARNT_REQUESTS = 120.0, 0.04, 100
PAIRS = 60
#: Two-sided 95% quantile of the normal distribution: 60 pairs are enough for it.
Z95 = 1.96
LOAD = ("--api", "vllm", "--model", vllm.NAME, "--prompt-tokens", "16:48", "--tokens", "8:16")


class Ratio(NamedTuple):
    """A ratio with its 95% interval, from paired logarithms."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        """Return the ratio, its interval and the number of pairs."""
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}] ({self.pairs} pairs)"


def ratio_of(pairs: Iterable[tuple[float, float]]) -> Ratio:
    """Return the geometric mean of second/first over *pairs*, with its interval."""
    logs = [math.log(b / a) for a, b in pairs]
    mean = statistics.fmean(logs)
    half = Z95 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


class Load:
    """The load generator and what it has written so far."""

    def __init__(self, port: int, out: Path, *args: object) -> None:
        out.unlink(missing_ok=True)
        self.out = out
        self.process = spawn(python("tests.demo.load", "--port", port, "--out", out, *LOAD, *args), OTHER_CPU)

    def records(self) -> list[dict[str, Any]]:
        """Return every finished request."""
        lines = self.out.read_text().split("\n")[:-1] if self.out.exists() else []
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        """End it; requests in flight are given up."""
        stop(self.process)


def chunks_in(records: list[dict[str, Any]], begin_ns: int, end_ns: int) -> float:
    """Return the tokens that arrived in an interval; those of a request are taken to arrive evenly."""
    total = 0.0
    for r in records:
        first, last = r["first_ns"], r["end_ns"]
        if r["chunks"] and last > first:
            inside = min(last, end_ns) - max(first, begin_ns)
            total += r["chunks"] * max(0, inside) / (last - first)
    return total


def direct(
    directory: Path, server: vllm.Server, load_args: tuple[object, ...], seconds: float
) -> dict[str, Any]:
    """Measure direct cost under one load, the agent with default settings beside the API server."""
    load = Load(server.port, directory / "client.jsonl", *load_args)
    agent = Agent(directory, server.pid, 0)
    try:
        learning = _learn(load, agent)
        before, agent_0, began = _cpu(server), agent.cpu_ns(), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        server_cores = (_cpu(server) - before) / elapsed / 1e9
        agent_cores = (agent.cpu_ns() - agent_0) / elapsed / 1e9
        costs = probe_costs()
        pss = agent.pss_bytes()
    finally:
        stop(agent.process)
        load.stop()
    records = load.records()
    span_s = (max(r["end_ns"] for r in records) - min(r["start_ns"] for r in records)) / 1e9
    return {
        "direct_cost_ratio": (costs["bpf_cores"] + agent_cores) / server_cores,
        "server_cores": server_cores,
        "agent_cores": agent_cores,
        **costs,
        "requests_per_s": len(records) / span_s,
        "tokens_per_s": sum(r["chunks"] for r in records) / span_s,
        "pss_mb": pss / 1e6,
        **learning,
    }


def _learn(load: Load, agent: Agent) -> dict[str, float]:
    """Wait until the agent has its baseline: what that takes is paid once, and measured here."""
    began, used = time.monotonic(), agent.cpu_ns()
    while time.monotonic() - began < LEARN_S:
        before = agent.cpu_ns()
        time.sleep(5)
        if len(load.records()) > LEARNT_REQUESTS and (agent.cpu_ns() - before) / 5e9 < LEARNT_CORES:
            break
    elapsed = time.monotonic() - began
    return {"learning_s": elapsed, "learning_cores": (agent.cpu_ns() - used) / elapsed / 1e9}


def paired(
    directory: Path,
    server: vllm.Server,
    load_args: tuple[object, ...],
    *,
    measure: Callable[[list[dict[str, Any]], int, int], float],
    pairs: int,
    say: Callable[[str], None],
) -> tuple[Ratio, Ratio]:
    """Return the ratio with the agent against without, and that of pairs without the agent in both."""
    load = Load(server.port, directory / "client.jsonl", *load_args)
    windows: list[tuple[bool, int, int]] = []
    kinds: list[str] = []
    try:
        time.sleep(5)
        order = ["ab", "aa"] * math.ceil(pairs / 2)
        random.shuffle(order)
        for number, kind in enumerate(order):
            kinds.append(kind)
            pattern = [False] * 4 if kind == "aa" else random.choice(([0, 1, 1, 0], [1, 0, 0, 1]))
            windows += _block(directory, server.pid, [bool(p) for p in pattern])
            if number % 10 == 9:
                say(f"{number + 1} of {len(order)} blocks")
    finally:
        load.stop()
    records = load.records()
    values = [measure(records, begin, end) for _, begin, end in windows]
    with_agent: list[tuple[float, float]] = []
    without: list[tuple[float, float]] = []
    for block, kind in enumerate(kinds):
        four = range(4 * block, 4 * block + 4)
        for i, j in ((four[0], four[1]), (four[2], four[3])):
            if kind == "aa":
                without.append((values[i], values[j]))
            else:
                off, on = (j, i) if windows[i][0] else (i, j)
                with_agent.append((values[off], values[on]))
    return ratio_of(with_agent), ratio_of(without)


def _block(directory: Path, pid: int, pattern: list[bool]) -> list[tuple[bool, int, int]]:
    """Measure four windows; the agent is started and stopped between them, and both are waited for."""
    out: list[tuple[bool, int, int]] = []
    agent: Agent | None = None
    try:
        for on in pattern:
            changes = on != (agent is not None) or not out
            if on and agent is None:
                # With the baseline that the direct measurement has left: learning is paid once, not at each start.
                agent = Agent(directory, pid, 0, {OTHER_CPU}, fresh=False)
                agent.pin({WORKER_CPU})
            elif not on and agent is not None:
                stop(agent.process)
                agent = None
            time.sleep(SETTLE_S if changes else 0)
            begin = time.monotonic_ns()
            time.sleep(WINDOW_S)
            out.append((on, begin, time.monotonic_ns()))
    finally:
        if agent is not None:
            stop(agent.process)
    return out


def shares(cost: dict[str, Any]) -> list[str]:
    """Return a table of the probes, the dearest first: hits, time per hit, and share of the server's CPU."""
    lines = [f"{'probe':16} {'hits/s':>9} {'ns each':>8} {'of a core':>10} {'of the server':>14}"]
    for probe, run in cost["probes"].items():
        part = run["cores"] / cost["server_cores"] if cost["server_cores"] else 0.0
        lines.append(
            f"{probe:16} {run['hits_per_s']:9,} {run['ns_per_hit']:8,} {run['cores']:10.3%} {part:14.3%}"
        )
    part = cost["agent_cores"] / cost["server_cores"] if cost["server_cores"] else 0.0
    lines.append(f"{'agent':16} {'':9} {'':8} {cost['agent_cores']:10.3%} {part:14.3%}")
    return lines


def tell(name: str, cost: dict[str, Any], say: Callable[[str], None]) -> None:
    """Say what watching costs under one load, each probe by itself."""
    say(
        f"{name}: {cost['requests_per_s']:.1f} requests/s, {cost['tokens_per_s']:.0f} tokens/s, "
        f"server {cost['server_cores']:.2f} cores; direct cost {cost['direct_cost_ratio']:.2%} "
        f"(probes {cost['bpf_cores']:.2%}, agent {cost['agent_cores']:.2%} of a core)"
    )
    for line in shares(cost):
        say(f"  {line}")


def _ttft_ms(records: list[dict[str, Any]], begin_ns: int, end_ns: int) -> float:
    found: list[int] = [
        r["first_ns"] - r["start_ns"] for r in records if r["first_ns"] and begin_ns <= r["start_ns"] < end_ns
    ]
    return statistics.median(found) / 1e6


def _cpu(server: vllm.Server) -> int:
    return sum(cpu_ns(pid) for pid in server.pids())


def run(directory: Path, pairs: int = PAIRS, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run everything: half an hour with 60 pairs, a fifth of them for the latency. Keys hold ``_vllm``."""
    directory.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {OTHER_CPU})
    with (directory / "vllm.log").open("wb") as log:
        server = vllm.start(free_port(), stdout=log, stderr=subprocess.STDOUT)
        try:
            server.wait_ready(say)
            server.pin({WORKER_CPU}, {OTHER_CPU})
            saturated = direct(directory, server, ("--closed", CLIENTS), 30.0)
            tell("saturation", saturated, say)
            half_rate = ("--rate", saturated["requests_per_s"] / 2)
            half = direct(directory, server, half_rate, 30.0)
            tell("half capacity", half, say)
            throughput, noise = paired(
                directory, server, ("--closed", CLIENTS), measure=chunks_in, pairs=pairs, say=say
            )
            say(f"tokens/s with the agent against without {throughput}; A/A {noise}")
            ttft, ttft_noise = paired(
                directory, server, half_rate, measure=_ttft_ms, pairs=max(pairs // 5, 2), say=say
            )
            say(f"median TTFT with the agent against without {ttft}; A/A {ttft_noise}")
        finally:
            server.stop()
    return {
        "direct_cost_ratio_vllm": saturated["direct_cost_ratio"],
        "direct_cost_ratio_vllm_half": half["direct_cost_ratio"],
        "throughput_ratio_vllm": throughput.value,
        "throughput_ratio_vllm_low": throughput.low,
        "throughput_ratio_vllm_high": throughput.high,
        "throughput_aa_vllm": [noise.value, noise.low, noise.high],
        "throughput_pairs_vllm": [throughput.pairs, noise.pairs],
        "ttft_ratio_vllm": ttft.value,
        "ttft_interval_vllm": [ttft.low, ttft.high],
        "ttft_aa_vllm": [ttft_noise.value, ttft_noise.low, ttft_noise.high],
        "cost_vllm": saturated,
        "cost_vllm_half": half,
    }
