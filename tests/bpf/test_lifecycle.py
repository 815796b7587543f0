"""Ten starts and five kills of the agent leave nothing; the whole of it is `python -m tests.bench.lifecycle`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan.config import Targets
from whyspan.discovery import Discovery
from whyspan.pipeline.source import LiveSource
from whyspan_probes.features import kernel_version
from whyspan_probes.registry import Found
from whyspan_probes.safety import seccomp_mode
from whyspan_probes.state import ProbeState

from tests.bench import lifecycle
from tests.bench import lifecycle_traces as traces
from tests.bench.lifecycle_client import Target, targets
from tests.bpf.conftest import Watch
from tests.bpf.waiting import until
from tests.bpf.watcher import Watcher

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

#: Since then the kernel tells what a link of `uprobe.multi` is at.
TOLD = kernel_version(os.uname().release) >= (6, 8)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Target, Target]]:
    with targets(tmp_path) as both:
        yield both


def test_what_nobody_holds_is_found(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch("sched")
    kern = traces.kernel()
    mine = traces.reached(traces.held([os.getpid()]), kern)
    ours = {(kind, kern.names[kind, i]) for kind, i in mine}
    assert {kind for kind, _ in ours} == {"prog", "map", "link"}
    assert not {(kind, i) for kind, i, _ in traces.orphans(ours)} & mine
    pids = traces.pids()
    monkeypatch.setattr(traces, "pids", lambda: [p for p in pids if p != os.getpid()])
    assert {(kind, i) for kind, i, _ in traces.orphans(ours)} >= mine


def test_what_is_hooked_in_a_target_is_seen(pair: tuple[Target, Target], probes: dict[str, Found]) -> None:
    free, confined = pair
    assert (seccomp_mode(free.tgid), seccomp_mode(confined.tgid)) == (0, 2)
    w = Watcher([probes["marker"], probes["llama"], probes["sockets"]])
    try:
        w.watch(free.tgid, confined.tgid)
        w.session.follow([free.tgid, confined.tgid], 1.0)
        for target in pair:
            assert {*target.hooked()} == {
                *("llama_encode", "whyspan_mark_v1", "SSL_read", "SSL_do_handshake", "the marker's semaphore")
            }
        mine = traces.held([os.getpid()])
        if TOLD:
            at = {pid for link, pid in traces.return_probes() if ("link", link) in mine}
            assert at == {free.tgid}
    finally:
        w.close()
    until(lambda: not free.hooked() + confined.hooked(), "no hook is left")
    assert free.harm() == confined.harm() == []


def test_an_attach_that_is_ended_leaves_nothing(probes: dict[str, Found]) -> None:
    class EndedError(Exception):
        pass

    told: list[str] = []

    def progress(state: ProbeState) -> None:
        told.append(state.name)
        if len(told) == 3:
            raise EndedError

    before = traces.held([os.getpid()])
    with pytest.raises(EndedError):
        LiveSource(
            probes.values(),
            Discovery(Targets(auto=False)),
            ring_bytes=1 << 20,
            header_allow=[],
            progress=progress,
        )
    assert len(told) == 3
    assert traces.held([os.getpid()]) == before


@pytest.mark.timeout(900)
def test_starts_and_kills_leave_nothing(tmp_path: Path) -> None:
    figures = lifecycle.run(tmp_path, starts=10, kills=5, seed=11)
    assert figures["leaks"] == []
    assert figures["starts"] == 10
    assert figures["kills"] > 0
    assert figures["hooked_when_ready"] == 6  # each second start, and the one that learns
    assert bool(figures["return_probes_seen"]) == TOLD
    assert min(figures["answers_verified"].values()) > 100
