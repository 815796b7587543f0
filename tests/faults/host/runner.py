"""Runs cases on one server with the agent beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.demo import truth
from tests.demo.procs import DemoError, python, spawn, stop, until
from tests.demo.truth import Sent
from tests.faults.host import decoys, guesses, judging, score
from tests.faults.host.arrivals import Arrivals
from tests.faults.host.case import BenchHands, Case, Done, Outcome, family
from tests.faults.host.client import ClientLoop, HostClient, Steady
from tests.faults.host.score import CaseScore, Window
from tests.faults.host.world import KINDS, REST_CPU, WORK_CPU, World
from tests.faults.runner import Agent

CALIBRATE = 50
BASELINE = 70  # the agent needs 50 ordinary ones of a class
SLOWED_WANTED = 12
CAP_RATIO = 4
GAP_S = 1.5
ALONE_S = 2.0  # a decoy before the fault: what is found then is a false alarm
SERVED_S = 30.0
CASE_S = 120  # a case ends then, whatever becomes of its server


class Bench:
    """One server, one agent, some cases one after the other."""

    def __init__(
        self,
        folder: Path,
        world: World,
        seed: int,
        console: Console,
        *,
        parents: Mapping[str, str],
        causes: Sequence[str],
        record: Path | None = None,
    ) -> None:
        """*parents*: of sub-ids. *causes*: of all faults, for guesses by chance. *record*: where recordings go."""
        self.folder, self.world, self.seed, self.console = folder, world, seed, console
        self.parents, self.causes, self.record = parents, causes, record
        self.client, self.loop = HostClient(world.host, world.port), ClientLoop()
        self.victim: Mapping[str, Any] = {}
        self.objective_ms = 0
        self.usual_ns = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        self.console.print(f"{time.monotonic() - self._began:6.1f} s  {text}", highlight=False, markup=False)

    def _body(self) -> Mapping[str, Any]:
        return {**self.world.healthy(), **self.victim}

    async def run(self, cases: Sequence[Case]) -> Outcome:
        """Run the cases and judge them.

        Raises:
            DemoError: there is no healthy phase, or the agent ended.
        """
        kind = KINDS[self.world.server]
        steady = Steady(self.client, kind.per_s, self._body)
        outcome = Outcome()
        async with AsyncExitStack() as undo:
            undo.callback(self.loop.close)
            await self.loop.do(steady.start())
            undo.push_async_callback(lambda: self.loop.do(steady.stop()))
            await until(lambda: len(self.client.sent) >= CALIBRATE, 60, "healthy requests")
            self._calibrate(self.client.sent[10:])
            agent = Agent(
                self.folder,
                self.world.process.pid,
                "host",
                self.objective_ms,
                cpus={REST_CPU},
                rates=kind.rates,
                record=True,
            )
            undo.callback(stop, agent.process, 15)
            await until(agent.ready, 60, "the agent ready")
            arrivals = Arrivals(agent.state / "whyspan.db")
            await self.loop.do(arrivals.start())
            undo.push_async_callback(lambda: self.loop.do(arrivals.stop()))
            undo.callback(stop, sampler := self._sampler())
            since = await self._baseline()
            for number, case in enumerate(cases):
                if not self.world.alive():
                    outcome.rest = list(cases[number:])
                    break
                outcome.done.append(await self._case(case, agent, steady))
            await self.loop.do(steady.stop())
            await self._settle(outcome, agent)
            stop(sampler)
            stop(agent.process, 15)  # now baseline and recording are written
            self._judge(outcome, agent, arrivals.seen_ns, since)
        return outcome

    def _sampler(self) -> Any:
        pid, out = self.world.process.pid, self.folder / "samples.jsonl"
        return spawn(
            python("tests.faults.host.sampler", "--pid", pid, "--cpu", WORK_CPU, "--out", out), REST_CPU
        )

    def _calibrate(self, healthy: Sequence[Sent]) -> None:
        times = [s.latency_ns for s in healthy if s.status == 200 and not s.error]
        if len(times) < len(healthy) / 2:
            raise DemoError(f"only {len(times)} of {len(healthy)} healthy requests were answered")
        self.objective_ms = int(truth.percentile(times, 0.99) / 1e6 * 1.15) + 3
        usual = truth.percentile(times, 0.5) / 1e6
        self.say(f"healthy without the agent: median {usual:.1f} ms, objective {self.objective_ms} ms")

    async def _baseline(self) -> int:
        """Wait for ordinary requests beside the agent; return when that began."""
        since, first = time.monotonic_ns(), len(self.client.sent)
        await until(lambda: len(self.client.sent) >= first + BASELINE, 60, "a baseline")
        usual = self.client.sent[first + 5 :]
        self.usual_ns = truth.percentile((s.latency_ns for s in usual), 0.5)
        self.say(f"the agent watches; usual {self.usual_ns / 1e6:.1f} ms beside it")
        return since

    def _hands(self, case: Case, agent: Agent) -> BenchHands:
        return BenchHands(
            server=case.server,
            pids={role: list(pids) for role, pids in self.world.pids.items()},
            folder=self.folder,
            rng=case.rng(self.seed),
            port=self.world.port,
            host=self.world.host,
            agent_pids=family(agent.process.pid),
            client=self.client,
            loop=self.loop,
            healthy=self.world.healthy,
        )

    async def _case(self, case: Case, agent: Agent, steady: Steady) -> Done:
        fault = case.fault
        causes = score.allowed(fault.causes, self.parents)
        result = CaseScore(case.server, fault.id, case.decoy, causes, code=fault.code)
        done = Done(case, result, Window(0, 0, 0, 0))
        hands = self._hands(case, agent)
        usual_rate = steady.per_s
        begin = on = off = time.monotonic_ns()
        try:
            async with asyncio.timeout(CASE_S), AsyncExitStack() as stack:
                proof = await stack.enter_async_context(decoys.by_name(case.decoy)(hands))
                if case.decoy:
                    await asyncio.sleep(ALONE_S)
                begin = on = time.monotonic_ns()
                done.injected = await stack.enter_async_context(fault.inject(hands))
                self.victim, steady.per_s = fault.victim, fault.per_s or usual_rate
                on = time.monotonic_ns()
                await self._last(case, on)
                off = time.monotonic_ns()
                self.victim, steady.per_s = {}, usual_rate
                result.bites = await asyncio.to_thread(done.injected.bites)
                try:
                    result.decoy_proof = await asyncio.to_thread(proof)
                except DemoError as exc:
                    result.decoy_missing = str(exc)
        except Exception as exc:  # one that fails must not end the others
            result.error = f"{type(exc).__name__}: {exc}"
        finally:
            self.victim, steady.per_s = {}, usual_rate
        end = time.monotonic_ns()
        done.window = Window(begin, on, max(off, on) if result.bites else end, end)
        result.on_s = (done.window.off_ns - on) / 1e9
        told = [
            result.error or result.bites,
            result.decoy_proof and f"decoy: {result.decoy_proof}",
            result.decoy_missing,
        ]
        self.say(f"{case.name} was on for {result.on_s:.1f} s: {'; '.join(t for t in told if t)}")
        try:
            await until(lambda: self._served() or not self.world.alive(), SERVED_S, "served normally again")
        except DemoError as exc:
            result.error = result.error or f"afterwards {exc}"
        await asyncio.sleep(GAP_S)
        return done

    async def _last(self, case: Case, on_ns: int) -> None:
        """Wait until enough requests were slowed (or failed), or the cap."""
        least, most = case.fault.seconds, case.fault.seconds * CAP_RATIO
        while True:
            await asyncio.sleep(0.1)
            on_s = (time.monotonic_ns() - on_ns) / 1e9
            if on_s >= most or (on_s >= least and len(self._victims(case, on_ns, 1 << 63)) >= SLOWED_WANTED):
                return

    def _victims(self, case: Case, on_ns: int, off_ns: int) -> list[Sent]:
        limit_ns = self.objective_ms * 1_000_000
        return judging.victims(
            case, self.client.sent, on_ns, off_ns, usual_ns=self.usual_ns, objective_ns=limit_ns
        )

    def _served(self) -> bool:
        """Whether the tail is served: the latest requests are as quick as usual."""
        latest = self.client.sent[-5:]
        return all(s.status == 200 and s.latency_ns < self.objective_ms * 1_000_000 for s in latest)

    async def _settle(self, outcome: Outcome, agent: Agent) -> None:
        """Wait until the agent has explained all victims, as far as it does."""
        for d in outcome.done:
            d.victims = self._victims(d.case, d.window.on_ns, d.window.off_ns)
        wanted = {s.trace_id for d in outcome.done for s in d.victims}
        with suppress(DemoError):
            await until(
                lambda: wanted <= {f.request.trace_id for f in agent.findings()}, 6, "all explained", 0.5
            )

    def _judge(self, outcome: Outcome, agent: Agent, seen_ns: Mapping[str, int], since: int) -> None:
        sent = [s for s in self.client.sent if s.start_ns >= since]
        outcome.healthy = score.healthy(sent, [d.window for d in outcome.done], since)
        found = judging.latest(agent.findings())
        left_out = judging.not_explained(agent.state / "whyspan.db")
        judging.judge(
            outcome, sent, found, seen_ns, not_explained=left_out, objective_ns=self.objective_ms * 1_000_000
        )
        recording = self.folder / "run.rec"
        guesses.guess(
            outcome,
            self.folder / "samples.jsonl",
            recording,
            since_ns=since,
            seed=self.seed,
            causes=self.causes,
        )
        if self.record is not None:
            judging.record(outcome, recording, agent.state / "collector/baseline.json", self.record)
        log = agent.log.read_text(errors="replace")
        outcome.restarts = judging.restarts(log)
        if outcome.restarts:
            self.say(f"the agent's processes were restarted {outcome.restarts} times: {judging.crash(log)}")
