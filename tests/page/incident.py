"""A real incident for the page: the demo's server under load with the agent beside it, then too small a CPU quota."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from whyspan import clock
from whyspan_exporters.records import EXPORTER

from tests import tracefs
from tests.bench.ports import free_port
from tests.demo import truth
from tests.demo.agent import Agent
from tests.demo.cgroups import CpuGroup
from tests.demo.engines import DemoServer, cpu_of
from tests.demo.procs import DemoError, python, spawn, stop

CAUSE = "cpu.throttled"
PER_S = 12.0
#: Requests before the agent comes (their P99 makes the objective), and those that the agent sees before the fault.
_CALIBRATE, _BASELINE = 25, 50
#: Requests slowed in the fault before it ends, and what the history of the host must tell of it by then.
_SLOWED, _THROTTLED_US = 35, 500_000
#: Of the CPU that the server uses: well short of it, so that a period is missed in every request or two.
_QUOTA_RATIO = 0.7
_PATIENCE_S = 45.0


class Incident(NamedTuple):
    """What was done, by the injector's and the client's clocks alone; times are ns since the epoch.

    ``slowed``: trace ids of requests that began in the fault and took longer than the healthy P99.
    """

    store: Path
    service: str
    group: str
    watched_ns: int
    on_ns: int
    off_ns: int
    slowed: frozenset[str]


@contextlib.contextmanager
def throttled(folder: Path) -> Iterator[Incident]:
    """Throttle a server that the agent watches, for some requests; the agent goes on until the context ends.

    Raises:
        DemoError: Something ended, the quota did not bite, or the agent has not stored what the client saw.
    """
    server_cpu = max(os.sched_getaffinity(0))
    client_cpu = min(os.sched_getaffinity(0))
    with contextlib.ExitStack() as undo:
        undo.enter_context(tracefs.mounted())
        group = CpuGroup("page")
        undo.callback(group.remove)
        engine = DemoServer("asyncio", 12)
        undo.callback(engine.stop)
        undo.callback(group.set_quota, None)  # before it is asked to end
        log = undo.enter_context((folder / "server.log").open("wb"))
        port = free_port()
        engine.start(
            port, cpu=server_cpu, rest=client_cpu, join=group.join, log_fd=log.fileno(), say=lambda _: None
        )
        client = folder / "client.jsonl"
        load = spawn(
            python("tests.demo.load", "--port", port, "--rate", PER_S, "--out", client, *engine.load_args),
            client_cpu,
        )
        undo.callback(stop, load)

        def sent() -> list[truth.Sent]:
            return truth.read_sent(client)

        _until(lambda: len(sent()) >= 5, engine.check)
        used, began = cpu_of(engine), time.monotonic_ns()
        _until(lambda: len(sent()) >= 5 + _CALIBRATE, engine.check)
        usual_cpu = (cpu_of(engine) - used) / (time.monotonic_ns() - began)
        limit_ns = truth.percentile((s.latency_ns for s in sent()[5:]), 0.99) * 1.15 + 5_000_000
        agent = Agent(folder, engine, int(limit_ns / 1e6))
        agent.start(client_cpu)
        undo.callback(agent.stop)
        store = folder / "state" / "whyspan.db"

        def check() -> None:
            engine.check()
            agent.check_alive()

        _until(lambda: len(_stored(store)) >= 5, check)
        watched_ns, before = clock.now_unix_ns(), len(sent())
        _until(lambda: len(sent()) >= before + _BASELINE, check)

        periods, on_ns, on_mono = group.throttled_count(), clock.now_unix_ns(), time.monotonic_ns()
        group.set_quota(usual_cpu * _QUOTA_RATIO)

        def slowed() -> frozenset[str]:
            return frozenset(
                s.trace_id
                for s in sent()
                if s.start_ns >= on_mono and s.latency_ns > limit_ns and not s.error
            )

        _until(lambda: len(slowed()) >= _SLOWED and _throttled_us(store) > _THROTTLED_US, check)
        found, off_ns = slowed(), clock.now_unix_ns()
        if group.throttled_count() < periods + 10:
            raise DemoError("the quota did not bite")
        group.set_quota(None)
        stop(load, 10)
        ended = len(sent()) - before
        _until(lambda: found <= _stored(store) and _counted(store) >= ended, check)
        yield Incident(store, engine.service, group.path, watched_ns, on_ns, off_ns, found)


def _until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait until *done*, while all that must live does."""
    end = time.monotonic() + _PATIENCE_S
    while not done():
        check()
        if time.monotonic() > end:
            raise DemoError(f"not reached in {_PATIENCE_S:.0f} s")
        time.sleep(0.1)


def _ask(store: Path, query: str, *values: object) -> list[tuple[object, ...]]:
    """Ask a store that the agent may not have made yet."""
    try:
        with contextlib.closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True)) as db:
            return db.execute(query, values).fetchall()
    except sqlite3.OperationalError:
        return []


def _stored(store: Path) -> frozenset[str]:
    return frozenset(str(trace) for (trace,) in _ask(store, "SELECT trace_id FROM findings"))


def _throttled_us(store: Path) -> int:
    """Return how much longer the server was throttled by one sample of the host (one every 10 s) than by another."""
    query = (
        "SELECT MAX(us) - MIN(us) FROM (SELECT COALESCE(json_extract(sample, '$.totals.throttled_us.demo'), 0) AS us"
        " FROM host_samples WHERE instance != ?)"
    )
    return sum(int(str(us or 0)) for (us,) in _ask(store, query, EXPORTER))


def _counted(store: Path) -> int:
    return sum(int(str(n)) for (n,) in _ask(store, "SELECT requests FROM intervals"))
