"""A case, what a fault may use while it is injected, and what a run of cases yields."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from whyspan.model import Finding

from tests.demo.procs import DemoError
from tests.demo.truth import Sent
from tests.faults.host.client import ClientLoop, HostClient
from tests.faults.host.fault import Fault, Injected
from tests.faults.host.score import CaseScore, Window
from tests.faults.host.servers.control import PATH
from tests.faults.host.world import REST_CPU, WORK_CPU


@dataclass(frozen=True)
class Case:
    """A fault in a server, with a decoy or none."""

    server: str
    fault: Fault
    decoy: str = ""

    @property
    def name(self) -> str:
        """Server, fault and decoy."""
        return f"{self.server}/{self.fault.id}" + (f"+{self.decoy}" if self.decoy else "")

    def rng(self, seed: int) -> random.Random:
        """Return what its strength is drawn from: the same whatever runs before it."""
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        return random.Random(int.from_bytes(digest[:8], "big"))


@dataclass
class BenchHands:
    """What a fault may use: see ``fault.Hands``."""

    server: str
    pids: Mapping[str, Sequence[int]]
    folder: Path
    rng: random.Random
    port: int
    host: str
    agent_pids: Sequence[int]
    client: HostClient
    loop: ClientLoop
    healthy: Callable[[], Mapping[str, Any]]
    work_cpu: int = WORK_CPU
    rest_cpu: int = REST_CPU

    async def switch(self, fault: str, settings: Mapping[str, Any] | None) -> None:
        """Switch a fault's part in the server on or off.

        Raises:
            DemoError: the server did not take it.
        """
        status = await self.loop.do(self.client.post(PATH, {"fault": fault, "settings": settings}))
        if status != 200:
            raise DemoError(f"the server answered {status} to a switch of {fault}: see server.log")

    async def request(self, **body: Any) -> int:
        """Send a request that is nobody's victim; return its status."""
        return (await self.loop.do(self.client.other({**self.healthy(), **body}))).status


@dataclass
class Done:
    """A case that was run: its score, its window, who may be named, whom it slowed."""

    case: Case
    score: CaseScore
    window: Window
    injected: Injected | None = None
    victims: list[Sent] = field(default_factory=list)


@dataclass
class Outcome:
    """What a run yields. ``rest``: cases that were not reached because the server died."""

    done: list[Done] = field(default_factory=list)
    rest: list[Case] = field(default_factory=list)
    healthy: list[Sent] = field(default_factory=list)
    alarms: list[Finding] = field(default_factory=list)
    restarts: int = 0  # of the agent's processes: it must not crash


def family(pid: int) -> list[int]:
    """Return a process and all its descendants; nothing when it is gone."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [pid, *(p.pid for p in process.children(recursive=True))]
    return []
