"""Four faults that are really injected, and that undo themselves.

Each is a context manager; entering returns only when the fault is on, and leaving undoes it whatever
happened inside. ``CLEANUP`` is an exit stack that also runs at exit, so that Ctrl-C, SIGTERM and exceptions
leave nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.demo.cgroups import CpuGroup
from tests.demo.engines import Engine
from tests.demo.procs import DemoError, python, run_delay_ns, spawn, stop

CLEANUP = contextlib.ExitStack()
atexit.register(CLEANUP.close)

#: The hog must make the server wait at least this share of the time, or the fault was not injected.
MIN_RUN_DELAY_RATIO = 0.10


@dataclass(frozen=True)
class World:
    """What the faults act on. ``usual_cpu`` is the server's CPU use when healthy, in CPUs."""

    engine: Engine
    reader: subprocess.Popen[bytes]
    server_group: CpuGroup
    hog_group: CpuGroup
    server_cpu: int
    pipe_inode: int
    usual_cpu: float


@dataclass
class Injected:
    """A fault that is on. ``culprits`` may be named; ``check`` gives evidence, or raises if there is none."""

    culprits: set[int]
    check: Callable[[], str]


@contextlib.contextmanager
def quota(world: World) -> Iterator[Injected]:
    """A CPU quota on the server's cgroup, a little below what it uses."""
    before = world.server_group.throttled_count()

    def check() -> str:
        count = world.server_group.throttled_count() - before
        if count < 3:
            raise DemoError(f"the quota did not bite: throttled in {count} periods")
        return f"throttled in {count} periods"

    with _undo(world.server_group.set_quota, None):
        world.server_group.set_quota(world.engine.quota(world.usual_cpu))
        yield Injected(set(world.engine.pids()), check)


@contextlib.contextmanager
def cpu_hog(world: World) -> Iterator[Injected]:
    """A busy neighbour on the server's CPU, in a heavier cgroup.

    Own cgroups take both out of the scheduler's autogroups, so the weights alone decide who waits.
    """
    kind = world.engine.hog(world.usual_cpu)
    world.hog_group.set_weight(kind.weight)
    hog_process = spawn(
        python("tests.demo.hog", "--busy-ms", kind.busy_ms, "--rest-ms", kind.rest_ms),
        # Elsewhere at first: beside a thread that spins with sched_yield it might never get so far as to start.
        os.sched_getaffinity(0) - {world.server_cpu} or {world.server_cpu},
        before_exec=world.hog_group.join,
    )
    os.sched_setaffinity(hog_process.pid, {world.server_cpu})
    with _undo(stop, hog_process):
        started, before = time.monotonic(), run_delay_ns(world.engine.victim())

        def check() -> str:
            ratio = (run_delay_ns(world.engine.victim()) - before) / 1e9 / (time.monotonic() - started)
            if ratio < MIN_RUN_DELAY_RATIO:
                raise DemoError(f"the hog does not starve the server: run delay is {ratio:.1%} of the time")
            return f"run delay {ratio:.0%} of the time"

        yield Injected({hog_process.pid}, check)


@contextlib.contextmanager
def log_pipe(world: World) -> Iterator[Injected]:
    """The reader of the server's log pipe stops for a part of every period."""
    pause, period = world.engine.log_pause_s, world.engine.log_period_s
    with _undo(os.kill, world.reader.pid, signal.SIGUSR2):
        os.kill(world.reader.pid, signal.SIGUSR1)
        yield Injected({world.reader.pid}, lambda: f"reader pauses {pause:g} s of every {period:g} s")


@contextlib.contextmanager
def burst(world: World) -> Iterator[Injected]:
    """Every request costs 120 ms of CPU on the event loop before it streams."""
    with _undo(world.engine.burst, False):
        world.engine.burst(True)
        yield Injected(
            {world.engine.pid}, lambda: f"{world.engine.burst_s * 1000:.0f} ms on the event loop per request"
        )


@contextlib.contextmanager
def _undo(action: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Run ``action`` when the block is left, or at exit if it never is."""
    pending = threading.Event()
    pending.set()

    def once() -> None:
        if pending.is_set():
            pending.clear()
            with contextlib.suppress(ProcessLookupError):
                action(*args)

    CLEANUP.callback(once)
    try:
        yield
    finally:
        once()


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what it must be called, and whom the verdict must name."""

    id: str
    title: str
    cause: str
    inject: Callable[[World], contextlib.AbstractContextManager[Injected]]
    names_culprit: Callable[[dict[str, Any], World, set[int]], bool]


def _is_server_group(culprit: dict[str, Any], world: World, _: set[int]) -> bool:
    return culprit.get("kind") == "cgroup" and str(culprit.get("name", "")).rstrip("/").endswith(
        world.server_group.path.lstrip("/")
    )


def _is_hog(culprit: dict[str, Any], _world: World, pids: set[int]) -> bool:
    return culprit.get("tgid") in pids and culprit.get("kind") in {"process", "thread"}


def _is_reader(culprit: dict[str, Any], world: World, pids: set[int]) -> bool:
    pipe = f"pipe:[{world.pipe_inode}]"
    return culprit.get("tgid") in pids or pipe in (culprit.get("name"), culprit.get("detail"))


def _is_loop(culprit: dict[str, Any], world: World, _: set[int]) -> bool:
    # uvicorn runs its loop on the main thread, whose tid is the tgid.
    return culprit.get("tgid") == world.engine.pid and culprit.get("tid") == world.engine.pid


FAULTS = (
    Fault("quota", "CPU quota on the server's cgroup", "cpu.throttled", quota, _is_server_group),
    Fault("hog", "CPU hog on the server's CPU", "cpu.runqueue", cpu_hog, _is_hog),
    Fault("log_pipe", "log pipe reader stops", "io.log_blocked", log_pipe, _is_reader),
    Fault("burst", "CPU burst on the event loop", "python.loop_blocked", burst, _is_loop),
)
