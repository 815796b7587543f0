"""The soak: ``python -m tests.bench.soak [--minutes M] [--per-minute R] [--seed N] [--out DIR]`` (root: probes).

A server under a steady load, faults of `tests.faults.host` in it on and off, an OTLP receiver that goes away, the
exporter and the collector killed once each, reloads of every kind; ``whyspan run`` beside it with the
defaults, but for a small store, and budgets that keep all probes on: on a busy host the governor would detach most.
Every 10 s memory, descriptors, threads, files and counters of the agent are noted. Everything is written to DIR as it
comes (``samples.jsonl``, ``events.jsonl``; at the end ``sent.jsonl``, ``findings.json``), and judged from there by
`soak_result`; ``--judge DIR`` does it again. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from tests import tracefs
from tests.bench import soak_plan, soak_result, soak_samples
from tests.bench.soak_load import CountingClient, Load, Spans
from tests.demo import truth
from tests.demo.procs import ROOT, DemoError, favour, spawn, stop, until
from tests.faults.host import registry
from tests.faults.host.case import BenchHands, family
from tests.faults.host.client import ClientLoop
from tests.faults.host.fault import HTTP, Launch
from tests.faults.host.world import REST_CPU, World
from tests.faults.host.world import start as start_world

SAMPLE_S, FOLLOW_S = 10.0, 2.0
CALIBRATE_S = 15.0
#: While a fault is on that does not say how much it can stand: the rate of the fault bench.
FAULT_PER_S = 10.0
CASE_S = 90.0

CONFIG = """\
[targets]
auto = false
match = [{{ pid = {pid}, service = "soak" }}]

[slo]
e2e_ms = {e2e_ms}

[collector]
ordinary_per_s = {ordinary_per_s}
budget_core_ratio = 0.2
budget_target_ratio = 0.5
disable_probes = {disable_probes}

[store]
max_mb = {store_mb}

[otlp]
endpoint = "{endpoint}"
protocol = "http/protobuf"
spool_mb = {spool_mb}
metrics_interval_s = 10
timeout_s = {timeout_s}

[run]
state_dir = "{state}"
"""
BROKEN = '[collector]\nordinary_per_s = "often"\n'
#: What a reload changes, to and fro: a key of each effect (see `whyspan.reloading`).
CHANGED: dict[str, tuple[str, tuple[str, str]]] = {
    "live": ("ordinary_per_s", ("0.1", "0.2")),
    "rebuild": ("disable_probes", ("[]", '["power"]')),
    "reopen": ("timeout_s", ("10", "9")),
}
#: Not the script beside the interpreter: a copy of the tree runs its own code.
_RUN = "from whyspan.cli import main; main()"


class Soak:
    """One soak in a folder."""

    def __init__(self, folder: Path, seconds: float, per_s: float, seed: int, console: Console) -> None:
        self.folder, self.seconds, self.per_s, self.seed, self.console = folder, seconds, per_s, seed, console
        self.state = folder / "state"
        self.spans = Spans()
        self.victim: Mapping[str, Any] = {}
        self.settings = {key: values[0] for key, values in CHANGED.values()}
        self.world: World
        self.load: Load
        self._began = time.monotonic()

    async def run(self) -> None:
        """Do it all and leave the record in the folder.

        Raises:
            DemoError: the server or the agent did not start.
        """
        async with AsyncExitStack() as stack:
            self.world = start_world(HTTP, Launch(), self.folder, self.console)
            stack.callback(self.world.close)
            self.loop = ClientLoop()
            stack.callback(self.loop.close)
            self.client = CountingClient(self.world.host, self.world.port)
            self.load = Load(self.client, self.per_s, lambda: {**self.world.healthy(), **self.victim})
            await self.loop.do(self.load.start())
            await asyncio.sleep(min(CALIBRATE_S, self.seconds / 8))
            objective = self._calibrated()
            self.store = soak_samples.Store(self.state)
            self._start_agent(objective)
            stack.callback(stop, self.agent, 15)
            await until(lambda: self._ready() == 1, 60, "the agent ready")
            self._note("ready", objective_ms=objective, pid=self.world.process.pid)
            tasks = [
                asyncio.ensure_future(t)
                for t in (self._faults(), self._happen(), self._sample(), self._follow())
            ]
            await asyncio.wait(tasks, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks[:2]:
                task.cancel()
            ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
            self.spans.up()
            await self.loop.do(self.load.stop())
            self._note("load ended", begun=self.load.begun)
            await self._settled()
            for task in tasks[2:]:
                task.cancel()
            ended += await asyncio.gather(*tasks[2:], return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    self._note("broke", error=f"{type(error).__name__}: {error}")
            await self._end()

    def _calibrated(self) -> float:
        times = [s.latency_ns for s in self.client.sent if s.status == 200 and not s.error]
        if len(times) < 20:
            raise DemoError(f"only {len(times)} requests were answered")
        return int(max(truth.percentile(times, 0.99) * 1.15, truth.percentile(times, 0.5) * 2) / 1e6) + 3

    def _configure(self) -> None:
        text = CONFIG.format(
            pid=self.world.process.pid,
            e2e_ms=self.objective,
            **self.settings,
            store_mb=soak_plan.STORE_MB,
            endpoint=self.spans.endpoint,
            spool_mb=soak_plan.SPOOL_MB,
            state=self.state,
        )
        (self.folder / "whyspan.toml").write_text(text)

    def _start_agent(self, objective: float) -> None:
        self.objective = objective
        self._configure()
        argv = [sys.executable, "-c", _RUN, "run", "--config", str(self.folder / "whyspan.toml")]
        env = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
        with (self.folder / "agent.log").open("wb") as log:
            self.agent = spawn(
                argv,
                {REST_CPU},
                deadly=signal.SIGTERM,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
            )
        favour(self.agent)

    def _log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")

    def _ready(self) -> int:
        if self.agent.poll() is not None:
            raise DemoError(f"the agent ended with {self.agent.returncode}: {self._log()[-1500:]}")
        return self._log().count("ready after")

    def _note(self, what: str, **details: Any) -> None:
        line = {"at_s": time.monotonic(), "unix_ns": time.time_ns(), "what": what, **details}
        with (self.folder / "events.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
        self.console.print(
            f"{time.monotonic() - self._began:7.1f} s  {what} {details}", highlight=False, markup=False
        )

    async def _faults(self) -> None:
        for turn in range(1 << 30):
            for name, on_s, rest_s in soak_plan.faults(self.seed + turn):
                await asyncio.sleep(rest_s)
                await self._fault(name, on_s, turn)

    async def _fault(self, name: str, on_s: float, turn: int) -> None:
        fault = registry.load(name)
        hands = BenchHands(
            server=HTTP,
            pids={role: list(pids) for role, pids in self.world.pids.items()},
            folder=self.folder,
            rng=random.Random(f"{self.seed}/{name}/{turn}"),
            port=self.world.port,
            host=self.world.host,
            agent_pids=family(self.agent.pid),
            client=self.client,
            loop=self.loop,
            healthy=self.world.healthy,
        )
        told = error = ""
        begin = on = off = time.monotonic_ns()
        try:
            async with asyncio.timeout(CASE_S):
                self.load.limit = fault.per_s or FAULT_PER_S
                async with fault.inject(hands) as injected:
                    self.victim, on = fault.victim, time.monotonic_ns()
                    await asyncio.sleep(on_s)
                    off = time.monotonic_ns()
                    self.victim = {}
                    told = await asyncio.to_thread(injected.bites)
        except Exception as exc:  # one that fails must not end the soak
            error = f"{type(exc).__name__}: {exc}"
        finally:
            self.victim, self.load.limit = {}, 0.0
        self._note(
            "fault",
            name=name,
            causes=fault.causes,
            begin_ns=begin,
            on_ns=on,
            off_ns=off,
            bites=told,
            error=error,
        )

    async def _happen(self) -> None:
        began = time.monotonic()
        for at_s, what, details in soak_plan.happenings(self.seconds, self.seed):
            await asyncio.sleep(max(began + at_s - time.monotonic(), 0))
            if what == "kill":
                await self._kill(details["role"])
            elif what == "reload":
                await self._reload(**details)
            else:
                self._note("outage", **details)
                await asyncio.to_thread(self.spans.down) if details["how"] == "down" else self.spans.refuse(
                    503
                )
                await asyncio.sleep(details["seconds"])
                self.spans.up()
                self._note("outage over")
        await asyncio.sleep(1 << 30)

    async def _kill(self, role: str) -> None:
        pid, ready = soak_samples.roles(self.agent.pid).get(role, 0), self._ready()
        if not pid:
            self._note("not killed", role=role)
            return
        self._note("kill", role=role, pid=pid, counters=self.store.counters())
        os.kill(pid, signal.SIGKILL)
        if role == "collector":
            await until(lambda: self._ready() > ready, 60, "a new collector")
        else:
            await until(
                lambda: soak_samples.roles(self.agent.pid).get(role, pid) != pid, 60, "a new exporter"
            )
        self._note("back", role=role)

    async def _reload(self, kind: str) -> None:
        ready = self._ready()
        if kind == "broken":
            (self.folder / "whyspan.toml").write_text(BROKEN)
        else:
            key, (one, other) = CHANGED[kind]
            self.settings[key] = other if self.settings[key] == one else one
            self._configure()
        self._note("reload", kind=kind)
        self.agent.send_signal(signal.SIGHUP)
        if kind == "rebuild":
            await until(lambda: self._ready() > ready, 60, "the collector attached again")
            self._note("back", role="collector")
        await asyncio.sleep(5)
        self._configure()  # whoever is restarted reads a right one

    async def _sample(self) -> None:
        with (self.folder / "samples.jsonl").open("a") as out:
            while True:
                line = await asyncio.to_thread(soak_samples.sample, self.agent.pid, self.state, self.store)
                line["sent"], line["spans"] = len(self.client.everything), sum(self.spans.traces.values())
                out.write(json.dumps(line) + "\n")
                out.flush()
                await asyncio.sleep(SAMPLE_S - time.monotonic() % SAMPLE_S)

    async def _follow(self) -> None:
        while True:
            await asyncio.to_thread(self.store.follow)
            await asyncio.to_thread(self.spans.take)
            await asyncio.sleep(FOLLOW_S)

    async def _settled(self) -> None:
        """Wait until counters and spans come to rest."""
        before: Any = None
        for _ in range(12):
            await asyncio.sleep(5)
            counted = sum(v for _, name, _, v, _ in self.store.counters() if name == "requests")
            queued = self.store.statuses().get("exporter", {}).get("sinks", {}).get("otlp", {})
            now = counted, len(self.store.found), sum(self.spans.traces.values()), str(queued.get("traces"))
            if now == before:
                return
            before = now

    async def _end(self) -> None:
        last = await asyncio.to_thread(soak_samples.sample, self.agent.pid, self.state, self.store)
        counters, began = self.store.counters(), time.monotonic()
        self.agent.terminate()
        try:
            status = await asyncio.to_thread(self.agent.wait, 15)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        self._note("agent ended", status=status, took_s=time.monotonic() - began)
        self.store.follow()
        self.spans.take()
        with suppress(OSError):
            last["files"] = soak_samples.files(self.state)
        (self.folder / "sent.jsonl").write_text(
            "".join(
                json.dumps([s.trace_id, s.start_ns, s.end_ns, s.status, s.error]) + "\n"
                for s in self.client.everything
            )
        )
        (self.folder / "findings.json").write_text(
            json.dumps(
                {"found": self.store.found, "spans": self.spans.traces, "counters": counters, "last": last}
            )
        )


def main() -> int:
    """Soak, judge, print."""
    parser = argparse.ArgumentParser(prog="tests.bench.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--per-minute", type=float, default=2000.0, help="requests")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak")
    parser.add_argument("--judge", type=Path, help="judge a record again")
    args = parser.parse_args()
    console = Console(width=200)
    if args.judge is None:
        if os.geteuid() != 0:
            print("the soak needs root", file=sys.stderr)
            return 2
        shutil.rmtree(args.out, ignore_errors=True)
        args.out.mkdir(parents=True)
        (args.out / "pid").write_text(f"{os.getpid()}\n")
        with suppress(OSError):  # no autogroups; else the load keeps its rate on a busy host
            Path("/proc/self/autogroup").write_text("-7")
        with tracefs.mounted():
            asyncio.run(Soak(args.out, args.minutes * 60, args.per_minute / 60, args.seed, console).run())
    return soak_result.report(args.judge or args.out, console)


if __name__ == "__main__":
    sys.exit(main())
