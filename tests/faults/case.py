"""What a fault case is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.client import Client

Body = Mapping[str, Any]


@dataclass
class World:
    """What a case may use. ``pids``: the server's processes by role."""

    client: Client
    pids: dict[str, list[int]]
    cpu: int  # where the engine works
    per_s: float = 10.0
    victim: Callable[[], Body] | None = None  # set by a case: what victims ask while it is on
    healthy: Callable[[], Body] = dict  # what they ask otherwise
    folder: Path = Path()  # where switches for the server lie

    def ask(self) -> Body:
        """Return what a victim asks now."""
        return (self.victim or self.healthy)()


Culprit = Mapping[str, Any]


def anyone(culprit: Culprit, world: World) -> bool:
    """Accept any culprit that is named."""
    return bool(culprit.get("name"))


def traced(label: str) -> Callable[[Culprit, World], bool]:
    """Accept a culprit whose trace is one of the requests sent under a label."""
    return lambda culprit, world: culprit.get("trace_id") in world.client.traces.get(label, ())


def process(role: str) -> Callable[[Culprit, World], bool]:
    """Accept a process of the server by its role, or a thread of it."""
    return lambda culprit, world: culprit.get("tgid") in world.pids[role]


@dataclass(frozen=True)
class Case:
    """One fault. ``causes``: the ids that are right, the most exact first.

    ``inject`` is on while it is entered. ``open_report``: a request must be reported while the fault lasts.
    """

    name: str
    causes: tuple[str, ...]
    inject: Callable[[World], AbstractAsyncContextManager[None]]
    culprit: Callable[[Culprit, World], bool] = anyone
    seconds: float = 4.0
    per_s: float = 0.0  # victims, while it is on; 0: as always
    open_report: bool = False


@asynccontextmanager
async def settled() -> AsyncIterator[None]:
    """Do nothing."""
    yield
