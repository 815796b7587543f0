"""The real agent beside a real server with faults, scraped by Prometheus and sending OTLP to VictoriaMetrics.

The server is the stub engine of the fault bench in a CPU group of its own: its faults give causes of an engine, a quota
of the group gives throttling.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from tests import tracefs
from tests.bench.ports import free_port
from tests.boards import boards
from tests.boards.boards import Query
from tests.boards.stores import Labels, Prometheus, QueryError, Store, Victoria
from tests.demo.cgroups import CpuGroup
from tests.demo.procs import ROOT, DemoError, favour, pin, python, spawn, stop, wait_http
from tests.faults import lab_cases
from tests.faults.case import World
from tests.faults.client import Client, Steady
from tests.unit.receivers import HttpReceiver

CONFIG = """\
[targets]
auto = false
match = [{{ pid = {pid}, service = "lab" }}]

[slo]
e2e_ms = 120
ttft_ms = 80
inter_token_ms = 50

[collector]
explain_per_s = 50
ordinary_per_s = 10
explain_core_ratio = 1

[otlp]
protocol = "http/protobuf"
metrics_interval_s = 1

[prometheus]
listen = "127.0.0.1:{port}"

[burst]
on_breach = ["malloc"]
causes = ["cpu", "engine"]
seconds = 1
min_interval_s = 5

[run]
state_dir = "{state}"
"""
ENGINE_CPU, REST_CPU = 1, 0
PER_S = 6.0
BASELINE_S, FAULT_S, QUIET_S = 14.0, 7.0, 3.0
#: At most so long until every query has an answer, after the last fault.
SETTLE_S = 60.0
TRACES_S = 20.0
QUOTA = 0.05


class Filled(NamedTuple):
    """What both stores said of every query, at one time while the agent was alive."""

    answers: dict[tuple[str, str], list[Labels]]  # by store and where the query stands
    errors: dict[tuple[str, str], str]
    exemplars: dict[str, frozenset[str]]  # trace ids that a panel shows
    causes: frozenset[str]  # of these, those that panels of lost time show
    traces: frozenset[str]  # that the receiver of spans got
    sent: frozenset[str]  # that clients began


def fill(folder: Path, say: Callable[[str], None] = lambda _: None) -> Filled:
    """Run the agent, the server, the faults and both stores, and ask every query; about 90 s, root."""
    with ExitStack() as stack:
        stack.enter_context(tracefs.mounted())
        own = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, own)
        os.sched_setaffinity(0, {REST_CPU})
        group = CpuGroup("boards")
        stack.callback(group.remove)
        world = _server(stack, group)
        receiver = HttpReceiver()
        stack.callback(receiver.stop)
        shipped = yaml.safe_load((boards.FOLDER / "prometheus" / "prometheus.yml").read_text())
        scraped = free_port()
        prometheus = Prometheus(
            folder / "prometheus",
            {REST_CPU},
            shipped["scrape_configs"][0]["relabel_configs"],
            (f"127.0.0.1:{scraped}",),
        )
        victoria = Victoria(folder / "victoria", {REST_CPU})
        for store in (prometheus, victoria):
            stack.callback(store.stop)
            store.start()
        agent = _agent(folder, world.pids["front"][0], scraped, victoria, receiver)
        stack.callback(stop, agent, 15)
        return asyncio.run(_run(Running(world, group, agent, (prometheus, victoria), receiver), say))


def _server(stack: ExitStack, group: CpuGroup) -> World:
    port = free_port()
    server = spawn(
        python("tests.stubs.lab_engine", "--port", port),
        {ENGINE_CPU},
        env={**os.environ, "PYTHONPATH": str(ROOT / "probes" / "whyspan_inproc")},
        before_exec=group.join,
        stdout=subprocess.DEVNULL,
    )
    stack.callback(stop, server)
    favour(server)
    wait_http(f"http://127.0.0.1:{port}/health", server)
    pids: dict[str, list[int]] = {"front": [server.pid], "core": [], "worker": []}
    for child in psutil.Process(server.pid).children(recursive=True):
        pids["core" if child.name() == "lab-core" else "worker"].append(child.pid)
        pin(child.pid, {ENGINE_CPU})
    return World(Client(port), pids, ENGINE_CPU, healthy=lab_cases.healthy)


def _agent(
    folder: Path, pid: int, port: int, victoria: Victoria, receiver: HttpReceiver
) -> subprocess.Popen[bytes]:
    state = folder / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    config = folder / "whyspan.toml"
    config.write_text(CONFIG.format(pid=pid, port=port, state=state))
    env = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")} | {
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": victoria.otlp,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{receiver.endpoint}/v1/traces",
    }
    argv = [str(Path(sys.executable).with_name("whyspan")), "run", "--config", str(config)]
    with (folder / "agent.log").open("wb") as log:
        agent = spawn(
            argv,
            {REST_CPU},
            deadly=signal.SIGTERM,
            env=env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    favour(agent)
    end = time.monotonic() + 30
    while "ready after" not in (text := (folder / "agent.log").read_text(errors="replace")):
        if agent.poll() is not None or time.monotonic() > end:
            raise DemoError(f"the agent is not ready: {text[-1500:]}")
        time.sleep(0.1)
    return agent


class Running(NamedTuple):
    """What runs."""

    world: World
    group: CpuGroup
    agent: subprocess.Popen[bytes]
    stores: tuple[Prometheus, Victoria]
    receiver: HttpReceiver


async def _run(running: Running, say: Callable[[str], None]) -> Filled:
    world, group, agent, stores, receiver = running
    began_s = time.time()
    steady = Steady(world.client, lambda: PER_S, world.ask)
    steady.start()
    await asyncio.sleep(BASELINE_S)
    for name in ("transfer", "kv", "prefill"):
        case = next(c for c in lab_cases.CASES if c.name == name)
        say(f"fault {name}")
        async with case.inject(world):
            await asyncio.sleep(FAULT_S)
        await asyncio.sleep(QUIET_S)
    say("a full cache, no quota left")
    await lab_cases.set_faults(world, blocks=200, evict=True)
    await asyncio.sleep(FAULT_S)
    group.set_quota(QUOTA)
    await asyncio.sleep(FAULT_S)
    group.set_quota(None)
    await lab_cases.set_faults(world)
    queries = [q for q in boards.promql() if not boards.needs_hardware(q.text)]
    say("queries")
    answers: dict[tuple[str, str], list[Labels]] = {}
    errors: dict[tuple[str, str], str] = {}
    open_ = [(store, query) for store in stores for query in queries]
    end = time.monotonic() + SETTLE_S
    while open_ and time.monotonic() < end:
        if agent.poll() is not None:
            raise DemoError(f"the agent ended with {agent.returncode}")
        open_ = [pair for pair in open_ if not await asyncio.to_thread(_ask, *pair, answers, errors)]
        await asyncio.sleep(1.0)
    for query in (q for q in boards.promql() if boards.needs_hardware(q.text)):
        for store in stores:
            await asyncio.to_thread(_ask, store, query, answers, errors)
    shown = {
        q.where: await asyncio.to_thread(_exemplars, stores[0], q, began_s) for q in boards.exemplar_queries()
    }
    await steady.stop()
    causes = frozenset(i for where, ids in shown.items() if "lost" in where.lower() for i in ids)
    traces: frozenset[str] = frozenset()
    while not causes <= traces and time.monotonic() < end + TRACES_S:
        await asyncio.sleep(0.5)
        traces = frozenset(span.trace_id.hex() for span in receiver.spans())
    client = world.client
    sent = {s.trace_id for s in client.sent} | {i for ids in client.traces.values() for i in ids}
    say(f"{len(open_)} queries without an answer; {len(traces)} traces, {len(causes)} shown for causes")
    return Filled(answers, errors, shown, causes, traces, frozenset(sent))


def _exemplars(store: Prometheus, query: Query, began_s: float) -> frozenset[str]:
    return frozenset(e["trace_id"] for e in store.exemplars(query.text, began_s, time.time()))


def _ask(
    store: Store,
    query: Query,
    answers: dict[tuple[str, str], list[Labels]],
    errors: dict[tuple[str, str], str],
) -> bool:
    """Whether there is an answer, kept in *answers*, or a refusal, kept in *errors*."""
    key = store.name, query.where
    try:
        answers[key] = store.query(query.text, time.time())
    except QueryError as exc:
        errors[key] = str(exc)
        return True
    return bool(answers[key])


def main() -> None:
    """Print what has no answer (to work on the boards)."""
    folder = ROOT / "build" / "boards"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = fill(folder, lambda text: print(f"{time.strftime('%X')} {text}", flush=True))
    hardware: Any = {q.where for q in boards.promql() if boards.needs_hardware(q.text)}
    for key, text in found.errors.items():
        print("ERROR", key, text)
    for (store, where), series in found.answers.items():
        if not series and where not in hardware:
            print("EMPTY", store, where)
    print("exemplars", {where: len(ids) for where, ids in found.exemplars.items()})


if __name__ == "__main__":
    main()
