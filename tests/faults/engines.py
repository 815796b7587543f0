"""The servers that cases are run against: started, pinned, stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from rich.console import Console

from tests import tracefs
from tests.bench.ports import free_port
from tests.demo.procs import ROOT, favour, pin, python, spawn, stop, wait_http
from tests.engine import inproc, middleware, vllm
from tests.faults import lab_cases, vllm_cases
from tests.faults.case import Body, Case, World
from tests.faults.client import Client
from tests.faults.runner import Bench, Score, as_json

ENGINE_CPU, REST_CPU = 1, 0


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Return the cases named, or all."""
    return [c for c in cases if not only or c.name in only]


def folder_of(name: str) -> Path:
    """Return where a run leaves its files."""
    folder = ROOT / "build" / f"faults-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lab(only: Sequence[str], console: Console) -> list[Score]:
    """Run cases against the stub engine."""
    folder = folder_of("lab")
    os.sched_setaffinity(0, {REST_CPU})
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(tracefs.mounted())
        env = {**os.environ, "PYTHONPATH": str(ROOT / "probes" / "whyspan_inproc")}
        server = spawn(
            python("tests.stubs.lab_engine", "--port", port, "--send-buffer", 1 << 16),
            {REST_CPU, ENGINE_CPU},
            env=env,
        )
        stack.callback(stop, server)
        favour(server)
        wait_http(f"http://127.0.0.1:{port}/health", server)
        pids: dict[str, list[int]] = {"front": [server.pid], "core": [], "worker": []}
        for child in psutil.Process(server.pid).children(recursive=True):
            role = "core" if child.name() == "lab-core" else "worker"
            pids[role].append(child.pid)
            pin(child.pid, {ENGINE_CPU})
        # All of the engine on one CPU, client and agent on the other.
        pin(server.pid, {ENGINE_CPU})
        world = World(Client(port), pids, ENGINE_CPU, healthy=lab_cases.healthy)
        bench = Bench(folder, world, "lab", server.pid, chosen(lab_cases.CASES, only), console=console)
        scores = asyncio.run(bench.run())
    (folder / "result.json").write_text(as_json(scores))
    return scores


def vllm_roomy(only: Sequence[str], console: Console) -> list[Score]:
    """Run cases against a vLLM with room for all."""
    # Without chunking a long prompt is one step: what default servers with a large budget do.
    extra = ("--max-num-batched-tokens", "4096")
    return _vllm("vllm", extra, chosen(vllm_cases.ROOMY, only), console)


def vllm_small(only: Sequence[str], console: Console) -> list[Score]:
    """Run cases against a vLLM with four slots and few KV blocks."""
    extra = (
        *("--max-num-seqs", "4", "--num-gpu-blocks-override", "65"),
        *("--middleware", "tests.engine.middleware.Deaf"),
    )
    return _vllm("vllm-small", extra, chosen(vllm_cases.SMALL, only), console, vllm_cases.small)


def _vllm(
    name: str,
    extra: Sequence[str],
    cases: Sequence[Case],
    console: Console,
    healthy: Callable[[], Body] = vllm_cases.healthy,
) -> list[Score]:
    folder = folder_of(name)
    os.sched_setaffinity(0, {REST_CPU})
    port = free_port()
    plugin = inproc.environment()
    with ExitStack() as stack:
        stack.enter_context(tracefs.mounted())
        log = stack.enter_context((folder / "vllm.log").open("wb"))
        server = vllm.start(
            port,
            extra=extra,
            env={
                **plugin,
                "PYTHONPATH": f"{plugin['PYTHONPATH']}{os.pathsep}{ROOT}",
                "VLLM_SERVER_DEV_MODE": "1",
                middleware.DEAF: str(folder / "deaf"),
            },
            cpus={REST_CPU, ENGINE_CPU},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        stack.callback(server.stop)
        server.wait_ready(lambda text: console.print(text, highlight=False))
        server.pin({ENGINE_CPU}, {REST_CPU})
        pids = {"front": [server.pid], "core": [server.engine_core], "worker": [server.worker]}
        client = Client(port)
        # What compiles something at its first use does so before the baseline.
        asyncio.run(client.other("warm", vllm_cases.ask(vllm_cases.unique(8), 4, n=12, logprobs=20)))
        world = World(client, pids, ENGINE_CPU, per_s=4, healthy=healthy, folder=folder)
        bench = Bench(folder, world, "vllm", server.pid, cases, console=console)
        # Client, front end, core and agent share a CPU: explaining everything would slow all of them.
        bench.rates = {"explain_per_s": 5, "ordinary_per_s": 3, "core_ratio": 0.3}
        scores = asyncio.run(bench.run())
    (folder / "result.json").write_text(as_json(scores))
    return scores
