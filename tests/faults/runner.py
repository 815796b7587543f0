"""Runs fault cases against a server with the agent beside it, and scores the verdicts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from whyspan.model import Finding
from whyspan_exporters.reader import Reader

from tests.demo import truth
from tests.demo.procs import DemoError, favour, spawn, stop
from tests.faults.case import Case, World
from tests.faults.client import Steady

BASELINE = 90
GAP_S = 1.5
CATCH_UP_S = 20.0
SLOWED_RATIO = 1.75
CONFIG = """\
[targets]
auto = false
match = [{{ pid = {pid}, service = "{service}" }}]

[slo]
e2e_ms = {e2e_ms}

[collector]
explain_per_s = {explain_per_s}
ordinary_per_s = {ordinary_per_s}
explain_core_ratio = {core_ratio}

[run]
state_dir = "{state}"
"""


@dataclass
class Score:
    """How a case went. ``linked``: of the right ones that must name a request, whose trace was the culprit's."""

    case: Case
    members: int = 0
    slowed: int = 0
    right: int = 0
    excess_ms: float = 0.0
    unexplained: int = 0  # over the agent's own limits: counted by it, not judged here
    open_seen: bool = True
    misses: Counter[str] = field(default_factory=Counter)
    sentence: str = ""

    @property
    def ratio(self) -> float:
        """Share of the slowed requests named rightly."""
        judged = self.slowed - self.unexplained
        return self.right / judged if judged else 0.0


class Agent:
    """One ``whyspan run`` beside the server."""

    def __init__(
        self,
        folder: Path,
        pid: int,
        service: str,
        e2e_ms: int,
        *,
        cpus: set[int],
        rates: Mapping[str, float],
        record: bool = False,
    ) -> None:
        """*rates*: explanations per second, of slow requests and of ordinary ones. *record*: write ``run.rec``."""
        self.state, self.log = folder / "state", folder / "agent.log"
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        config = folder / "whyspan.toml"
        config.write_text(CONFIG.format(pid=pid, service=service, e2e_ms=e2e_ms, state=self.state, **rates))
        if record or os.environ.get("WHYSPAN_FAULTS_RECORD"):
            config.write_text(
                config.read_text().replace("[collector]", f'[collector]\nrecord = "{folder}/run.rec"')
            )
        argv = [str(Path(sys.executable).with_name("whyspan")), "run", "--config", str(config)]
        with self.log.open("wb") as log:
            self.process = spawn(
                argv, cpus, deadly=signal.SIGTERM, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        favour(self.process)

    def ready(self) -> bool:
        """Whether it watches.

        Raises:
            DemoError: it ended.
        """
        text = self.log.read_text(errors="replace")
        if self.process.poll() is not None:
            raise DemoError(f"the agent ended: {text[-1500:]}")
        return "ready after" in text

    def findings(self) -> list[Finding]:
        """Return what its store holds, open reports included."""
        reader = Reader(self.state / "whyspan.db")
        try:
            return [s.finding for s in reader.newest(limit=100_000, ordinary=True)]
        finally:
            reader.close()

    def explained(self) -> set[str]:
        """Return the trace ids of the slow requests in its store; quick, for the client shares our event loop."""
        with closing(sqlite3.connect(f"file:{self.state / 'whyspan.db'}?mode=ro", uri=True)) as db:
            return {trace for (trace,) in db.execute("SELECT trace_id FROM findings WHERE slow")}


class Bench:
    """One server, one agent, some cases one after the other."""

    def __init__(
        self, folder: Path, world: World, service: str, pid: int, cases: Sequence[Case], *, console: Console
    ) -> None:
        self.folder, self.world, self.service, self.pid = folder, world, service, pid
        self.cases, self.console = cases, console
        self.windows: list[truth.Window] = []
        self.scores: dict[str, Score] = {}
        self.objective = 0
        self.rates: Mapping[str, float] = {"explain_per_s": 100, "ordinary_per_s": 1000, "core_ratio": 1.0}
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        self.console.print(f"{time.monotonic() - self._began:6.1f} s  {text}", highlight=False)

    async def run(self) -> list[Score]:
        """Run all cases and score them."""
        world, client = self.world, self.world.client
        steady = Steady(client, lambda: world.per_s, world.ask)
        steady.start()
        await self._until(lambda: len(client.sent) >= 40, 60)
        healthy = [s.latency_ns for s in client.sent[10:]]
        self.objective = int(truth.percentile(healthy, 0.99) / 1e6 * 1.15) + 3
        self.say(
            f"healthy: median {truth.percentile(healthy, 0.5) / 1e6:.1f} ms, objective {self.objective} ms"
        )
        agent = Agent(self.folder, self.pid, self.service, self.objective, cpus={0}, rates=self.rates)
        try:
            await self._until(agent.ready, 30)
            self.say("the agent watches")
            since = time.monotonic_ns()
            goal = len(client.sent) + BASELINE
            await self._until(lambda: len(client.sent) >= goal, 60)
            for case in self.cases:
                await self._case(case, agent)
            await steady.stop()
            judged = truth.judge(client.sent, self.windows, since)
            wanted = {s.trace_id for group in judged.slowed.values() for s in group}
            with suppress(DemoError):
                await self._until(lambda: wanted <= {f.request.trace_id for f in agent.findings()}, 30, 1.0)
            self._score(judged, agent)
        finally:
            await steady.stop()
            stop(agent.process, 15)
        return [self.scores[c.name] for c in self.cases]

    async def _until(self, done: Callable[[], bool], cap_s: float, every_s: float = 0.1) -> None:
        end = time.monotonic() + cap_s
        while not done():
            if time.monotonic() > end:
                raise DemoError(f"not reached in {cap_s:.0f} s")
            await asyncio.sleep(every_s)

    async def _case(self, case: Case, agent: Agent) -> None:
        begin = time.monotonic_ns()
        score = self.scores[case.name] = Score(case)
        usual, self.world.per_s = self.world.per_s, case.per_s or self.world.per_s
        async with case.inject(self.world):
            on = time.monotonic_ns()
            await asyncio.sleep(case.seconds)
            if case.open_report:
                score.open_seen = any(
                    f.request.outcome == "open"
                    and f.request.start_ns >= begin - 2_000_000_000
                    and f.verdict.cause in case.causes
                    for f in agent.findings()
                )
            off = time.monotonic_ns()
        self.world.per_s = usual
        end = time.monotonic_ns()
        self.windows.append(truth.Window(case.name, begin, on, off, end))
        self.say(f"{case.name} was on for {(off - on) / 1e9:.1f} s")
        await self._until(self._served, 30)
        await asyncio.sleep(GAP_S)
        # Faults seldom come one upon the other: the agent may catch up, as far as it wants to.
        limit = SLOWED_RATIO * self.objective * 1_000_000
        wanted = {s.trace_id for s in self.world.client.sent if s.start_ns >= begin and s.latency_ns > limit}
        with suppress(DemoError):
            await self._until(lambda: wanted <= agent.explained(), CATCH_UP_S, 1.0)

    def _served(self) -> bool:
        """Whether the tail is served: the latest requests are as quick as usual."""
        latest = [s.latency_ns for s in self.world.client.sent[-5:]]
        return max(latest) < 2 * self.objective * 1_000_000

    def _score(self, judged: truth.Truth, agent: Agent) -> None:
        by_trace: dict[str, Finding] = {}
        for f in agent.findings():
            known = by_trace.get(f.request.trace_id)
            if known is None or known.request.outcome == "open":
                by_trace[f.request.trace_id] = f
        for case in self.cases:
            score = self.scores[case.name]
            # Beyond the healthy P99 by itself may be chance; what took well over the usual, and more than the objective
            # allows, is slow for the agent too.
            least = max(SLOWED_RATIO * judged.usual_ns, 1_000_000 * self.objective)
            slowed = [s for s in judged.slowed[case.name] if s.latency_ns > least]
            score.members, score.slowed = len(judged.members[case.name]), len(slowed)
            excess = sorted((s.latency_ns - judged.usual_ns) / 1e6 for s in slowed)
            score.excess_ms = excess[len(excess) // 2] if excess else 0.0
            for s in slowed:
                verdict = by_trace.get(s.trace_id)
                if verdict is None:
                    score.unexplained += 1
                elif verdict.verdict.cause not in case.causes:
                    score.misses[verdict.verdict.cause or "no cause"] += 1
                elif not case.culprit(_plain(verdict), self.world):
                    score.misses[
                        f"culprit {verdict.verdict.culprit.kind} {verdict.verdict.culprit.name}"
                    ] += 1
                else:
                    score.right += 1
                    score.sentence = score.sentence or verdict.verdict.sentence
        alarms = [s for s in judged.healthy if (found := by_trace.get(s.trace_id)) and found.slow]
        self.say(f"{len(judged.healthy)} healthy requests, {len(alarms)} of them with a verdict")


def _plain(finding: Finding) -> dict[str, Any]:
    c = finding.verdict.culprit
    return {name: getattr(c, name) for name in c.__struct_fields__}


def table(scores: Sequence[Score]) -> Table:
    """Return the result as a table."""
    out = Table("case", "cause", "slowed", "right", "%", "excess ms", "misses")
    for s in scores:
        misses = ", ".join(f"{n}x {what}" for what, n in s.misses.most_common(3))
        if s.unexplained:
            misses += f" ({s.unexplained} not explained)"
        if not s.open_seen:
            misses += " [no report while it lasted]"
        out.add_row(
            *(s.case.name, s.case.causes[0], f"{s.slowed}/{s.members}", str(s.right), f"{s.ratio:.0%}"),
            *(f"{s.excess_ms:.1f}", misses),
        )
    return out


def as_json(scores: Sequence[Score]) -> str:
    """Return the result as JSON."""
    rows = [
        {
            "case": s.case.name,
            "cause": s.case.causes[0],
            "slowed": s.slowed,
            "right": s.right,
            "ratio": s.ratio,
        }
        | {
            "excess_ms": s.excess_ms,
            "misses": dict(s.misses),
            "open_seen": s.open_seen,
            "sentence": s.sentence,
        }
        for s in scores
    ]
    return json.dumps(rows, indent=1)
