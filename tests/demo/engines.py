"""The servers that the demo can inject faults into: its own small one, and a real vLLM on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.demo import server
from tests.demo.procs import DemoError, cpu_ns, python, spawn, stop, wait_http
from tests.engine import middleware, vllm

Say = Callable[[str], None]


class Hog(NamedTuple):
    """A busy neighbour: the weight of its cgroup, in default weights, and its rhythm."""

    weight: float
    busy_ms: float = 100.0
    rest_ms: float = 0.0


class Engine(Protocol):
    """A server under test. ``pid`` is the process that serves HTTP; its main thread runs the event loop."""

    name: str
    service: str
    rate: float  # requests per second that it serves with ease
    baseline_requests: int
    ordinary_per_s: float  # ordinary requests that the agent explains beside the slow ones
    burst_s: float
    log_pause_s: float  # how long the reader of its log stops, of every log_period_s
    log_period_s: float
    fault_cap_s: float  # a fault ends then, however few requests were slowed
    load_args: tuple[object, ...]
    pid: int

    def start(
        self, port: int, *, cpu: int, rest: int, join: Callable[[], None], log_fd: int, say: Say
    ) -> None:
        """Start it in a cgroup (``join`` enters it), its work on ``cpu``, its log on ``log_fd``; wait until ready."""

    def check(self) -> None:
        """Raise DemoError when it has died."""

    def pids(self) -> list[int]:
        """Return its processes."""

    def victim(self) -> int:
        """Return the process that the hog is to starve."""

    def quota(self, usual_cpu: float) -> float:
        """Return a CPU quota, in CPUs, that is a little short; ``usual_cpu`` is what it uses when healthy."""

    def hog(self, usual_cpu: float) -> Hog:
        """Return the hog that slows it but lets it live."""

    def burst(self, on: bool) -> None:
        """From now on spend ``burst_s`` of CPU time on the event loop before each request, or no longer."""

    def stop(self) -> None:
        """End it."""


def cpu_of(engine: Engine) -> int:
    """Return the CPU time of all its processes so far, in ns."""
    return sum(cpu_ns(pid) for pid in engine.pids())


class DemoServer:
    """The demo's own server: one process, one event loop, a thread per request."""

    name = "demo"
    service = "demo"
    rate = 6.0
    ordinary_per_s = 1000.0
    burst_s = server.BURST_S
    log_pause_s, log_period_s = 1.5, 3.0
    fault_cap_s = 16.0
    baseline_requests = 70

    def __init__(self, loop: str, tokens: int) -> None:
        self.loop = loop
        self.load_args: tuple[object, ...] = ("--tokens", tokens)
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def start(
        self, port: int, *, cpu: int, rest: int, join: Callable[[], None], log_fd: int, say: Say
    ) -> None:
        self._process = spawn(
            python("tests.demo.server", "--port", port, "--loop", self.loop),
            cpu,
            before_exec=join,
            stderr=log_fd,
        )
        self.pid = self._process.pid
        wait_http(f"http://127.0.0.1:{port}/healthz", self._process)

    def check(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise DemoError("the server died")

    def pids(self) -> list[int]:
        return [self.pid]

    def victim(self) -> int:
        return self.pid

    def quota(self, usual_cpu: float) -> float:
        return usual_cpu * 0.8

    def hog(self, usual_cpu: float) -> Hog:
        return Hog(1.0 / min(0.5, usual_cpu * 0.9) - 1.0)

    def burst(self, on: bool) -> None:
        os.kill(self.pid, signal.SIGUSR1 if on else signal.SIGUSR2)

    def stop(self) -> None:
        if self._process is not None:
            stop(self._process)


class Vllm:
    """A real vLLM server: API server, EngineCore and worker. The worker has a CPU of its own, as a GPU would."""

    name = "vllm"
    service = "vllm"
    rate = 4.0
    ordinary_per_s = 2.0
    burst_s = 0.100
    log_pause_s, log_period_s = 1.4, 2.6  # it logs 7 KB a second: the pipe is full after half of the pause
    fault_cap_s = 45.0
    baseline_requests = 110

    def __init__(self, directory: Path) -> None:
        self._switch = directory / "burst"
        self._server: vllm.Server | None = None
        self.load_args: tuple[object, ...] = (
            *("--api", "vllm", "--model", vllm.NAME, "--connections", 8),
            *("--prompt-tokens", "16:48", "--tokens", "8:16"),
        )
        self.pid = 0

    def start(
        self, port: int, *, cpu: int, rest: int, join: Callable[[], None], log_fd: int, say: Say
    ) -> None:
        self._switch.unlink(missing_ok=True)
        self._server = vllm.start(
            port,
            # Every request is logged with its parameters, as many installations do.
            extra=["--middleware", "tests.engine.middleware.Burst", "--enable-log-requests"],
            env={
                "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                middleware.SWITCH: str(self._switch),
            },
            before_exec=join,
            stdout=log_fd,
            stderr=log_fd,
        )
        self.pid = self._server.pid
        self._server.wait_ready(say)
        self._server.pin({cpu}, {rest})

    @property
    def server(self) -> vllm.Server:
        """The running server."""
        if self._server is None:
            raise DemoError("vLLM has not been started")
        return self._server

    def check(self) -> None:
        if self.server.process.poll() is not None:
            raise DemoError("vLLM died")

    def pids(self) -> list[int]:
        return self.server.pids()

    def victim(self) -> int:
        return self.server.worker

    def quota(self, usual_cpu: float) -> float:
        # It spins: what it uses says little of what it needs.
        return usual_cpu * 0.5

    def hog(self, usual_cpu: float) -> Hog:
        # Beside a thread that yields all the time the scheduler starves a group of lower weight altogether, and gives
        # a heavier one nearly all: only the hog's own rests leave the worker a share.
        return Hog(8.0, busy_ms=60, rest_ms=45)

    def burst(self, on: bool) -> None:
        if on:
            self._switch.write_text(str(self.burst_s))
        else:
            self._switch.unlink(missing_ok=True)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
