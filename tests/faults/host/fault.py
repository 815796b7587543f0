"""What a fault of the host bench is: a file with ``FAULT`` and, if part of it runs inside the server, ``INSIDE``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

#: The servers that faults are injected into: asyncio with worker threads, one thread per connection, a real vLLM.
HTTP, THREADED, VLLM = "http", "threaded", "vllm"

Culprit = Mapping[str, Any]  # the fields of ``whyspan.model.Culprit``


class Inside:
    """What a fault does in the server's process while it is on. Every method may be left as it is.

    The server imports the fault's module when the fault is first switched on there.
    """

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin; called on the event loop, or on a request's thread in the threaded server."""

    def stop(self) -> None:
        """Undo it."""

    async def on_loop(self) -> None:
        """Run on the event loop before each request is worked on; never called in the threaded server."""

    def on_worker(self) -> None:
        """Run on the thread that works for a request, before it does; never called in vLLM."""

    def routes(self) -> Mapping[str, Callable[[], bytes]]:
        """Return what answers a GET of a path, by path; on the event loop, or on a connection's thread."""
        return {}


@dataclass(frozen=True)
class Launch:
    """What a fault needs the server to be started with. Faults with equal ones share a server.

    ``memory_bytes``: limit of a memory cgroup of its own, 0 none. ``netns``: in a network namespace of its own, which
    the clients reach over a veth pair.
    """

    env: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()
    memory_bytes: int = 0
    netns: bool = False
    tls: bool = False


class Hands(Protocol):
    """What a fault may use while it is injected."""

    server: str  # HTTP, THREADED or VLLM
    pids: Mapping[
        str, Sequence[int]
    ]  # by role; "server" (its event loop's process) always; vLLM: core, worker
    work_cpu: int  # where the server works
    rest_cpu: int  # where clients and agent are
    folder: Path  # of this run
    rng: random.Random  # drawn from by strength, duration, target
    port: int
    host: str
    agent_pids: Sequence[int]

    async def switch(self, fault: str, settings: Mapping[str, Any] | None) -> None:
        """Switch a fault's ``INSIDE`` in the server on with settings, or off with None."""

    async def request(self, **body: Any) -> int:
        """Send a request that is nobody's victim; return its status."""


@dataclass
class Injected:
    """A fault that is on. ``names``: whether a verdict's culprit is the right one. ``bites``: evidence that it is real,
    in words; raises DemoError if there is none. Called once, when the fault has been on for its time.
    """

    names: Callable[[Culprit], bool]
    bites: Callable[[], str]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        id: also the module's name.
        causes: ids that are right, the most exact first; parents count as right.
        inject: on while it is entered; undoes itself whatever happens.
        servers: where it can be injected.
        seconds: how long it is on, at least (the bench goes on until enough requests were slowed, up to four times).
        decoys: names of ``tests/faults/host/decoys.py`` that must not be used with it, being causes of the same kind.
        per_s: victims per second, while it is on; 0: as always.
        victim: what victims ask while it is on, merged over the usual body.
        failing: its victims fail instead of being slow, and are judged when they do.
        code: functions of Python, qualified, of which one is the innermost while the time is lost; empty: none is.
    """

    id: str
    causes: tuple[str, ...]
    inject: Callable[[Hands], AbstractAsyncContextManager[Injected]]
    servers: tuple[str, ...] = (HTTP,)
    launch: Launch = field(default_factory=Launch)
    seconds: float = 4.0
    decoys: tuple[str, ...] = ()
    per_s: float = 0.0
    victim: Mapping[str, Any] = field(default_factory=dict)
    failing: bool = False
    code: tuple[str, ...] = ()
