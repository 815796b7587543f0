"""What must not break: targets that die or multiply, and an agent that is killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from whyspan.config import Target, Targets
from whyspan.discovery import Discovery
from whyspan.discovery import Found as FoundProcess
from whyspan.pipeline.source import LiveSource
from whyspan_probes.registry import Found

from tests.bpf.child import Child
from tests.bpf.conftest import Spawn, Watch
from tests.bpf.daemon import Daemon
from tests.bpf.http import Http, reading, writing
from tests.bpf.kernel import held_by, objects
from tests.bpf.waiting import until

pytestmark = pytest.mark.bpf


def test_a_recording_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, os.getpid(), collector=f'record = "{tmp_path}/nowhere/recording"')
    try:
        assert daemon.process.wait(20) == 2
        assert "collector.record: cannot write" in daemon.log
        assert "Traceback" not in daemon.log
    finally:
        daemon.kill()


REQUEST = b"GET /r HTTP/1.1\r\nHost: test\r\n\r\n"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"

Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``whyspan run`` on processes; it is ended with the test."""
    daemons: list[Daemon] = []

    def begin(*tgids: int, **options: str) -> Daemon:
        daemons.append(Daemon(tmp_path, *tgids, **options))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.kill()


def live_source(probes: dict[str, Found], discovery: Discovery, **options: Any) -> LiveSource:
    return LiveSource(probes.values(), discovery, ring_bytes=8 << 20, header_allow=[], **options)


def only(*tgids: int) -> Targets:
    return Targets(auto=False, match=tuple(Target(pid=t) for t in tgids))


class DyingTargets(Discovery):
    """Its processes die between being found and being watched."""

    def __init__(self, *victims: Child) -> None:
        super().__init__(only(*(v.tgid for v in victims)))
        self.victims = victims

    def scan(self, pids: Any = None) -> tuple[list[FoundProcess], list[int]]:
        result = super().scan(pids)
        for victim in self.victims:
            victim.kill()
        return result


def test_a_target_that_dies_while_it_is_attached_is_forgotten(probes: dict[str, Found], spawn: Spawn) -> None:
    victims = [spawn("sleeps", 1000), spawn("sleeps", 1000)]
    source = live_source(probes, DyingTargets(*victims))
    try:
        source.drain()
        source.scan()
        assert source.session.maps.watched() == set()
        assert source.discovery.found == {}
        assert source.drain().lost == {}
    finally:
        source.close()


def test_a_target_killed_in_mid_attach(probes: dict[str, Found], spawn: Spawn) -> None:
    victim = spawn("sleeps", 1000)
    attached = []

    def progress(state: Any) -> None:
        attached.append(state.state)
        victim.kill()

    source = live_source(probes, Discovery(only(victim.tgid)), progress=progress)
    try:
        assert attached == ["attached" if f.probe.hooks else "waiting" for f in probes.values()]
        assert source.discovery.found == {}
        source.drain()
    finally:
        source.close()


def test_a_storm_of_2000_processes(probes: dict[str, Found], spawn: Spawn) -> None:
    child = spawn("forks", 2000)
    source = live_source(probes, Discovery(only(child.tgid)))
    forked: set[int] = set()
    gone: set[int] = set()
    lost = 0
    try:
        child.say()
        end_s = time.monotonic() + 60
        while len(gone) < 2000 and time.monotonic() < end_s:
            batch = source.drain()
            forks = source.schema.select(batch.events, "sched_fork")
            exits = source.schema.select(batch.events, "sched_exit")
            forked |= {int(t) for t in forks["child_tgid"]}
            gone |= {int(e["tgid"]) for e in exits if e["aux"] == 1}
            lost += sum(batch.lost.values())
        child.answer()
        assert lost == 0
        assert len(forked) == 2000
        assert gone == forked

        def alone() -> bool:
            source.scan()  # one that ended while it was looked at is found gone
            return source.session.maps.watched() == {child.tgid}

        until(alone, "only the parent is left", every_s=0.3)
        assert set(source.discovery.found) == {child.tgid}
    finally:
        source.close()


def test_5000_threads(watch: Watch, spawn: Spawn) -> None:
    w = watch("sched", ring_bytes=16 << 20)
    child = spawn("threads_then_exit", 5000)
    w.watch(child.tgid)
    tids = set(child.run(timeout_s=60)["tids"])
    assert len(tids) > 1000
    assert {int(t) for t in w.rows("sched_fork", tgid=child.tgid)["child_tid"]} == tids
    child.end()
    w.wait(lambda: w.count("sched_exit", tgid=child.tgid) > len(tids), "the process is gone")
    exits = w.rows("sched_exit", tgid=child.tgid)
    assert {int(t) for t in exits["tid"]} == {*tids, child.tgid}
    assert int((exits["aux"] == 1).sum()) == 1
    assert w.dropped() == 0
    assert w.session.maps.watched() == set()


def test_a_killed_collector_leaves_nothing_in_the_kernel(start: Start, spawn: Spawn) -> None:
    child = spawn("sleeps", 1000)
    daemon = start(child.tgid)
    daemon.wait_ready()
    collector = daemon.child("collector")
    held = held_by(collector)
    assert {"prog", "link", "map"} == {kind for kind, _ in held}
    os.kill(collector, signal.SIGKILL)

    def left() -> set[tuple[str, int]]:
        return held & {(kind, i) for kind in ("prog", "link", "map") for i in objects(kind)}

    until(lambda: not left(), "programs, links and maps are gone")
    # The supervisor starts another, whose objects are its own.
    until(lambda: daemon.log.count("ready after") == 2, "a new collector is ready")
    assert "killed by signal 9" in daemon.log
    again = held_by(daemon.child("collector"))
    assert not again & held
    assert daemon.stop() == 0
    held = again
    until(lambda: not left(), "after an orderly stop, too")


@pytest.mark.parametrize("seed", range(7))
def test_a_stop_at_any_moment_of_the_start_is_clean(start: Start, spawn: Spawn, seed: int) -> None:
    child = spawn("sleeps", 1000)
    daemon = start(child.tgid)
    time.sleep(random.Random(seed).uniform(0.0, 1.2))
    status = daemon.stop(10)
    # Before the supervisor blocks its signals there is nothing to clean up: Python's own death is fine.
    assert status == 0 or (status == -signal.SIGTERM and "started" not in daemon.log), daemon.log
    assert "Traceback" not in daemon.log
    for name in ("collector", "exporter"):
        pid = daemon.child(name)
        assert not pid or not Path(f"/proc/{pid}").exists()


def test_a_stop_stores_what_was_seen(start: Start, spawn: Spawn, watch: Watch, tmp_path: Path) -> None:
    server = spawn("scripted_server")
    daemon = start(server.tgid)
    daemon.wait_ready()
    http = Http(watch("sockets"), server)
    for _ in range(29):
        http.talk(REQUEST, [reading(len(REQUEST)), writing(REPLY)])
    assert daemon.stop() == 0
    assert len(daemon.findings()) == 29
    database = sqlite3.connect(tmp_path / "state" / "whyspan.db")
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_a_dead_target_does_not_stop_the_agent(start: Start) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    daemon = start(dead.pid)
    daemon.wait_ready()
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
