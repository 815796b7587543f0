"""A server under test with all that its launch asks for: started, pinned, stopped."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.ports import free_port
from tests.demo.cgroups import CpuGroup
from tests.demo.procs import ROOT, DemoError, favour, python, spawn, stop, wait_http
from tests.engine import install, vllm
from tests.faults.host.fault import HTTP, THREADED, VLLM, Launch
from tests.faults.host.groups import MemoryGroup
from tests.faults.host.netns import Namespace

WORK_CPU, REST_CPU = 1, 0
PIPE_BYTES = 4096
TOKENS = 8
SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)


@dataclass(frozen=True)
class Kind:
    """What is usual for a kind of server: the agent's rates, victims per second."""

    per_s: float
    rates: Mapping[str, float]


# More than this would leave findings waiting while the server is flooded: verdicts would be late.
_EVERY = {"explain_per_s": 100, "ordinary_per_s": 1000, "core_ratio": 0.6}
KINDS = {
    HTTP: Kind(10.0, _EVERY),
    THREADED: Kind(10.0, _EVERY),
    # Client, front end, core and agent share a CPU: explaining everything would slow all of them.
    VLLM: Kind(4.0, {"explain_per_s": 3, "ordinary_per_s": 2, "core_ratio": 0.2}),
}


def unavailable(server: str, launch: Launch) -> str:
    """Return why a server cannot be started that way here, or nothing."""
    if launch.tls:
        return "TLS is not available yet"
    if server == VLLM and not install.installed():
        return "vLLM is not installed: `make vllm` does it"
    return ""


@dataclass
class World:
    """A running server. ``pids`` by role: ``server``, ``log_reader``; of vLLM also ``core`` and ``worker``."""

    server: str
    launch: Launch
    host: str
    port: int
    process: subprocess.Popen[bytes]
    pids: dict[str, list[int]]
    undo: ExitStack
    prompts: random.Random = field(default_factory=lambda: random.Random(7))

    def healthy(self) -> dict[str, Any]:
        """Return what a victim asks when nothing is wrong."""
        if self.server != VLLM:
            return {"max_tokens": TOKENS}
        return {
            "model": vllm.NAME,
            "prompt": [self.prompts.randrange(3, vllm.VOCABULARY) for _ in range(32)],
            "max_tokens": 12,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def alive(self) -> bool:
        """Whether the server's process is there."""
        return self.process.poll() is None

    def close(self) -> None:
        """Stop it and take everything away."""
        self.undo.close()


def start(server: str, launch: Launch, folder: Path, console: Console) -> World:
    """Start a server and wait until it answers.

    Raises:
        DemoError: it does not.
    """
    undo = ExitStack()
    try:
        return _start(server, launch, folder, console, undo)
    except BaseException:
        undo.close()
        raise


def _start(server: str, launch: Launch, folder: Path, console: Console, undo: ExitStack) -> World:
    joins: list[Callable[[], None]] = []
    # Groups of its own take it out of the scheduler's autogroups: weights alone decide who waits.
    group = CpuGroup(f"bench-{server}")
    undo.callback(group.remove)
    # What else runs on this machine is no fault of ours: as `favour` does for client and agent.
    group.set_weight(10, parent=True)
    joins.append(group.join)
    if launch.memory_bytes:
        memory = MemoryGroup(f"bench-{server}", launch.memory_bytes)
        undo.callback(memory.remove)
        joins.append(memory.join)
    host, port = "127.0.0.1", free_port()
    if launch.netns:
        namespace = Namespace(1)
        undo.callback(namespace.remove)
        joins.append(namespace.join)
        host = namespace.host

    def join() -> None:
        for one in joins:
            one()

    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, SETPIPE_SZ, PIPE_BYTES)
    reader = spawn(
        python("tests.demo.reader", "--pipe-fd", read_fd, "--out", folder / "server.log"),
        REST_CPU,
        pass_fds=[read_fd],
    )
    undo.callback(stop, reader)
    favour(reader)
    try:
        to = _To(server, launch, host, port, join, write_fd)
        process, pids = _vllm(to, console, undo) if server == VLLM else _own(to, undo)
    finally:
        os.close(read_fd)
        os.close(write_fd)
    return World(server, launch, host, port, process, {**pids, "log_reader": [reader.pid]}, undo)


@dataclass(frozen=True)
class _To:
    server: str
    launch: Launch
    host: str
    port: int
    join: Callable[[], None]
    log_fd: int


_Started = tuple[subprocess.Popen[bytes], dict[str, list[int]]]


def _own(to: _To, undo: ExitStack) -> _Started:
    process = spawn(
        python(
            f"tests.faults.host.servers.{to.server}", "--host", to.host, "--port", to.port, *to.launch.args
        ),
        WORK_CPU,
        before_exec=to.join,
        env={**os.environ, **dict(to.launch.env)},
        stderr=to.log_fd,
    )
    undo.callback(stop, process)
    wait_http(f"http://{to.host}:{to.port}/healthz", process)
    return process, {"server": [process.pid]}


def _vllm(to: _To, console: Console, undo: ExitStack) -> _Started:
    extra = ("--middleware", "tests.faults.host.servers.asgi.Faults", "--enable-log-requests")
    if to.launch.netns:
        raise DemoError("vLLM in a network namespace is not made yet")
    running = vllm.start(
        to.port,
        # Every request is logged with its parameters, as many installations do.
        extra=[*extra, *to.launch.args],
        env={"PYTHONPATH": str(ROOT), **dict(to.launch.env)},
        cpus={WORK_CPU, REST_CPU},
        before_exec=to.join,
        stdout=to.log_fd,
        stderr=to.log_fd,
    )
    undo.callback(running.stop)
    running.wait_ready(lambda text: console.print(text, highlight=False))
    running.pin({WORK_CPU}, {REST_CPU})
    pids = {"server": [running.pid], "core": [running.engine_core], "worker": [running.worker]}
    return running.process, pids
