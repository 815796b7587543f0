"""Snapshots of stalled processes: when they are taken, and what a finding keeps of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import pytest
from whyspan import stalled
from whyspan.cli import _snapshot
from whyspan.critical_path import Path
from whyspan.model import CodeFrame, Snapshot, StackFact, ThreadGroup
from whyspan.pipeline.snapshots import EVERY_S, PROCESS_EVERY_S, Snapshots, stalls

from tests.unit.timeline import LOOP, SERVER, WORKER, EventBuilder, ns

RUNNING, RUNNABLE, BLOCKED = range(3)
EPOLL_WAIT, FUTEX, NONE = 232, 202, -2
MS = 1_000_000
SECOND = 1000 * MS


def printed(*stalls: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<QIiI4x", since, tid, nr, state) for tid, since, state, nr in stalls)


class Walks:
    """Prints what it is told to; remembers what was asked."""

    def __init__(self) -> None:
        self.printed: dict[int, bytes] = {}
        self.taken: list[int] = []

    def __call__(self, hook: str, tgids: Iterable[int]) -> Mapping[int, bytes]:
        if hook == "take":
            self.taken += tgids
            return {}
        return {t: self.printed.get(t, b"") for t in tgids}


@pytest.fixture
def walks() -> Walks:
    return Walks()


@pytest.fixture
def snapshots(walks: Walks) -> Snapshots:
    made = Snapshots(walks, 200)
    made.serving = frozenset({LOOP, WORKER})
    return made


@pytest.mark.parametrize(
    ("state", "nr", "taken"),
    [
        (RUNNING, NONE, True),
        (RUNNABLE, NONE, True),
        (BLOCKED, FUTEX, True),
        (BLOCKED, EPOLL_WAIT, False),
    ],
)
def test_a_serving_thread_that_stalls_has_its_process_taken(
    snapshots: Snapshots, walks: Walks, state: int, nr: int, taken: bool
) -> None:
    walks.printed[SERVER] = printed((LOOP, SECOND, state, nr))
    snapshots.look([SERVER], SECOND + 199 * MS)
    assert not walks.taken
    snapshots.look([SERVER], SECOND + 200 * MS)
    assert walks.taken == [SERVER] * taken


def test_once_for_each_stall(snapshots: Snapshots, walks: Walks) -> None:
    walks.printed[SERVER] = printed((LOOP, SECOND, RUNNING, NONE))
    for s in range(2, 60):
        snapshots.look([SERVER], s * SECOND)
    assert walks.taken == [SERVER]
    walks.printed[SERVER] = printed((LOOP, 60 * SECOND, RUNNING, NONE))
    snapshots.look([SERVER], 61 * SECOND)
    assert walks.taken == [SERVER, SERVER]


def test_threads_that_serve_nothing_may_idle(snapshots: Snapshots, walks: Walks) -> None:
    walks.printed[SERVER] = printed((99, SECOND, RUNNING, NONE), (98, SECOND, BLOCKED, FUTEX))
    snapshots.look([SERVER], 9 * SECOND)
    assert not walks.taken


def test_not_too_often(snapshots: Snapshots, walks: Walks) -> None:
    now = 100 * SECOND
    for _ in range(100):  # a new stall every 0.1 s
        walks.printed[SERVER] = printed((LOOP, now - SECOND, RUNNING, NONE))
        walks.printed[2] = printed((WORKER, now - SECOND, RUNNING, NONE))
        snapshots.look([SERVER, 2], now)
        now += 100 * MS
    passed_s = 100 * 0.1
    assert walks.taken.count(SERVER) <= passed_s / PROCESS_EVERY_S + 1
    assert 2 <= len(walks.taken) <= passed_s / EVERY_S + 1


def test_a_frozen_process_is_taken_when_asked(snapshots: Snapshots, walks: Walks) -> None:
    snapshots.ask({7})
    snapshots.look([SERVER], SECOND)
    snapshots.look([SERVER], 9 * SECOND)
    assert walks.taken == [7]


def test_none_when_switched_off(snapshots: Snapshots, walks: Walks) -> None:
    snapshots.stall_ms = 0
    walks.printed[SERVER] = printed((LOOP, SECOND, RUNNING, NONE))
    snapshots.look([SERVER], 9 * SECOND)
    assert not walks.taken


def test_half_a_record_is_none() -> None:
    data = printed((1, 2, 0, NONE), (3, 4, 2, FUTEX))
    assert [s.tid for s in stalls(data[:-5])] == [1]
    assert not stalls(b"")


SPIN = [CodeFrame("spin", "/srv/serve.py", 3)]
IDLE = [CodeFrame("get", "/lib/queue.py", 171)]


def taken_at(b: EventBuilder, ms: float, snapshot: int) -> EventBuilder:
    b.add(
        "thread_state", ms, LOOP, stack=1, snapshot=snapshot, since_ns=ns(ms - 250), state=0, syscall_nr=NONE
    )
    for tid in (WORKER, WORKER, WORKER):
        b.add("thread_state", ms, tid, stack=2, snapshot=snapshot, since_ns=0, state=2, syscall_nr=FUTEX)
    return b


def test_a_finding_keeps_those_of_its_time_with_alike_threads_as_one() -> None:
    b = EventBuilder().known(StackFact(1, SERVER, 0, SPIN), StackFact(2, SERVER, 0, IDLE))
    for n, ms in enumerate((-5.0, 300.0, 400.0, 500.0, 600.0)):
        taken_at(b, ms, n)
    t = b.timelines(0, 700)
    found = stalled.snapshots(t, Path(ns(0), ns(700), [], 0), {SERVER}, {LOOP})
    assert [s.at_ns for s in found] == [ns(300), ns(400), ns(500)]
    first, second = found[0].groups
    assert (first.stalled, first.state, first.count, first.python) == (True, "running", 1, SPIN)
    assert first.for_ms == pytest.approx(250)
    assert (second.stalled, second.state, second.syscall, second.count) == (False, "blocked", "futex", 3)
    assert not stalled.snapshots(t, Path(ns(0), ns(700), [], 0), {SERVER + 1}, {LOOP})


def test_shown_as_lines() -> None:
    group = ThreadGroup(state="running", threads=["loop"], for_ms=250, stalled=True, python=SPIN)
    pool = ThreadGroup(state="blocked", syscall="futex", count=3, threads=["a", "b", "c"], python=IDLE)
    shown = _snapshot.lines(
        Snapshot(at_ns=ns(300), tgid=SERVER, process="py\x1bthon", groups=[group, pool], left_out=2), ns(0)
    )
    assert shown[0].startswith("  threads of py") and "\x1b" not in shown[0]
    assert f"[{SERVER}] at 300 ms: 6" in shown[0]
    assert shown[1:] == [
        "    > loop: running for 250 ms",
        "        spin (/srv/serve.py:3)",
        "    3 threads: a, b, c: blocked in futex",
        "        get (/lib/queue.py:171)",
        "    ... (2 more threads)",
    ]
