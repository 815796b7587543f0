"""The governor: measures what probes cost, and sheds in the declared order, saying so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from whyspan_probes import governor, program_stats
from whyspan_probes.governor import (
    CONFIRM_S,
    HEADROOM_RATIO,
    PERIOD_S,
    RETRY_S,
    TARGET_WINDOWS,
    WINDOW_S,
    Budget,
    Governor,
)
from whyspan_probes.loader import Session
from whyspan_probes.probe import Cost, Probe
from whyspan_probes.program_stats import RunStats
from whyspan_probes.state import ProbeState


class FakeProbe:
    """A loaded probe with one program that runs *hits* times a second and takes *core* of a core."""

    def __init__(self, name: str, fd: int, core: float, shed: int, hits: float = 1000) -> None:
        self.probe = Probe(name, name, (), {}, Cost.PER_UNIT, "", "", shed=shed)
        self.state = ProbeState(name, name, "per-unit", "attached")
        self.fd, self.core, self.hits = fd, core, hits
        self.attached = True

    def link_misses(self) -> int:
        return 0

    def program_fds(self) -> dict[str, int]:
        return {f"{self.probe.name}_program": self.fd} if self.attached else {}

    def shed(self, reason: str) -> None:
        self.attached = False
        self.state.state, self.state.reason = "shed", reason


class Machine:
    """A session and a clock: statistics grow only while a window is open, as the kernel's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *probes: FakeProbe) -> None:
        self.probes = list(probes)
        self.again: list[str] = []
        self.windows = 0
        self.opened = 0
        self.now_s = 100.0
        self.agent_s = self.targets_s = 0.0
        self.ran = {p.fd: [0.0, 0.0] for p in probes}
        machine = self

        class Window:
            def __init__(self) -> None:
                machine.windows += 1
                machine.opened += 1

            def close(self) -> None:
                machine.windows -= 1

        def read(fd: int) -> RunStats:
            ns, runs = self.ran[fd]
            return RunStats(round(ns), round(runs), 0)

        monkeypatch.setattr(governor, "StatsWindow", Window)
        monkeypatch.setattr(program_stats, "read", read)

    def governor(self, core: float = 0.01, target: float = 0.01) -> Governor:
        session = cast(Session, self)
        return Governor(session, Budget(core, target), lambda: self.agent_s, lambda: self.targets_s)

    def attach_again(self, probe: FakeProbe) -> None:
        self.again.append(probe.probe.name)
        probe.attached = True
        probe.state.state, probe.state.reason = "attached", ""

    def advance(self, s: float, agent: float = 0.0, targets: float = 0.0) -> None:
        self.now_s += s
        self.agent_s += agent * s
        self.targets_s += targets * s
        for p in self.probes:
            if self.windows and p.attached:
                self.ran[p.fd][0] += p.core * s * 1e9
                self.ran[p.fd][1] += p.hits * s

    def measure(self, g: Governor, agent: float = 0.0, targets: float = 0.0) -> None:
        """Take one whole window, and a second one when that was over budget; go on to the next period."""
        self.window(g, agent, targets)
        if g.confirming:
            self.advance(CONFIRM_S, agent, targets)
            self.window(g, agent, targets)
        self.advance(PERIOD_S)

    def window(self, g: Governor, agent: float = 0.0, targets: float = 0.0) -> bool:
        """Take one window; return whether the governor wants another soon."""
        assert not g.tick(self.now_s)
        self.advance(WINDOW_S, agent, targets)
        assert g.tick(self.now_s)
        return g.confirming


Make = Callable[..., Machine]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a machine with the given probes."""
    return lambda *probes: Machine(monkeypatch, *probes)


def states(m: Machine) -> dict[str, str]:
    return {p.probe.name: p.state.state for p in m.probes}


def test_it_measures_and_leaves_alone_what_is_within_budget(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.004, 1, 2000), FakeProbe("b", 4, 0.005, 2, 500))
    g = m.governor()
    m.measure(g, agent=0.002, targets=0.5)
    assert g.bpf_cores == pytest.approx(0.009)
    assert g.agent_cores == pytest.approx(0.002)
    assert g.target_cores == pytest.approx(0.5)
    a = m.probes[0].state
    assert [a.hits_per_s, a.core_ratio] == pytest.approx([2000, 0.004])
    assert a.ns_per_hit == pytest.approx(2000)
    assert states(m) == {"a": "attached", "b": "attached"}


def test_it_sheds_in_the_declared_order_one_at_a_time(
    machine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    m = machine(
        FakeProbe("third", 3, 0.02, 3),
        FakeProbe("first", 4, 0.011, 1),  # cheaper, but named first
        FakeProbe("never", 5, 0.5, 0),
        FakeProbe("second", 6, 0.03, 2),
    )
    g = m.governor()
    shed = []
    with caplog.at_level(logging.WARNING, "whyspan.governor"):
        for _ in range(5):
            before = states(m)
            m.measure(g)
            shed.append([name for name, state in states(m).items() if state != before[name]])
    assert shed == [["first"], ["second"], ["third"], [], []]
    assert states(m)["never"] == "attached"
    assert [r.getMessage().split()[1] for r in caplog.records] == ["first", "second", "third"]
    reason = m.probes[1].state.reason
    assert reason.startswith("over budget: probes 56.10%")
    assert "limit 1.00%" in reason


def test_it_stops_shedding_once_within_budget(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.02, 1), FakeProbe("b", 4, 0.005, 2))
    g = m.governor()
    for _ in range(3):
        m.measure(g)
    assert states(m) == {"a": "shed", "b": "attached"}
    assert g.bpf_cores == pytest.approx(0.005)
    assert (m.probes[0].state.core_ratio, m.probes[0].state.hits_per_s) == (0, 0)


def test_busy_targets_allow_more(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.05, 1))
    g = m.governor()
    m.measure(g, targets=6)  # 1% of six cores
    assert states(m) == {"a": "attached"}
    for _ in range(TARGET_WINDOWS - 1):
        m.measure(g, targets=4)
        assert states(m) == {"a": "attached"}  # they were busier a moment ago: starved now, perhaps
    m.measure(g, targets=4)
    assert states(m) == {"a": "shed"}
    assert Budget(0.01, 0.02).limit(0.1) == 0.01
    assert Budget(0.01, 0.02).limit(3) == pytest.approx(0.06)


def test_what_had_to_go_is_tried_again_when_there_is_room(machine: Make) -> None:
    full = FakeProbe("never", 5, 0.008, 0)
    m = machine(FakeProbe("a", 3, 0.02, 1), FakeProbe("b", 4, 0.02, 2), full)
    g = m.governor()
    gone_s = m.now_s
    while m.now_s - gone_s < 2 * RETRY_S:
        m.measure(g)
    assert states(m) == {"a": "shed", "b": "shed", "never": "attached"}
    for p in m.probes:
        p.core = 0.001
    m.measure(g)
    assert m.again == [
        "b"
    ]  # what would have been the last to go comes first, the next when its cost has been seen
    m.measure(g)
    assert m.again == ["b", "a"]
    assert set(states(m).values()) == {"attached"}


def test_it_is_not_tried_at_once(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.02, 1))
    g = m.governor()
    m.measure(g)
    m.probes[0].core = 0.001
    gone_s = m.now_s
    while not m.again:
        m.measure(g)
    assert RETRY_S - 3 * PERIOD_S < m.now_s - gone_s < 2 * RETRY_S


def test_it_is_not_tried_while_the_others_fill_the_budget(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.02, 1), FakeProbe("b", 4, HEADROOM_RATIO * 0.011, 0))
    g = m.governor()
    for _ in range(40):
        m.measure(g)
    assert (states(m)["a"], m.again) == ("shed", [])


def test_each_time_it_is_too_much_again_the_wait_doubles(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.05, 1))
    g = m.governor()
    tried_s: list[float] = []
    while len(tried_s) < 5:
        known = len(m.again)
        m.measure(g)
        if len(m.again) > known:
            tried_s.append(m.now_s)
    waits = [b - a for a, b in pairwise(tried_s)]
    assert all(1.5 < b / a < 2.5 for a, b in pairwise(waits)), waits


def test_a_peak_of_one_window_sheds_nothing(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.05, 1))
    g = m.governor()
    for _ in range(3):
        assert m.window(g)
        m.probes[0].core = 0.001
        m.advance(CONFIRM_S)
        assert not m.window(g)
        m.probes[0].core = 0.05
        m.advance(PERIOD_S)
    assert states(m) == {"a": "attached"}


def test_the_agents_own_use_alone_sheds_nothing(machine: Make) -> None:
    # Detaching a probe would not bring it down.
    m = machine(FakeProbe("a", 3, 0.005, 1))
    m.measure(m.governor(), agent=0.5)
    assert states(m) == {"a": "attached"}


def test_statistics_are_on_for_a_second_in_thirty(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.001, 1))
    g = m.governor()
    on = fresh = 0
    for _ in range(1200):  # five minutes in quarters of a second
        fresh += g.tick(m.now_s)
        on += m.windows
        assert m.windows <= 1
        m.advance(0.25)
    assert m.opened == fresh == 10
    assert on == 10 * 4


def test_closing_ends_the_window(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.001, 1))
    g = m.governor()
    g.tick(m.now_s)
    assert m.windows == 1
    g.close()
    g.close()
    assert m.windows == 0


def test_no_statistics_no_shedding(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    m = machine(FakeProbe("a", 3, 0.9, 1))
    tries = []

    def refuse() -> Any:
        tries.append(m.now_s)
        raise PermissionError(1, "no")

    monkeypatch.setattr(governor, "StatsWindow", refuse)
    g = m.governor()
    for _ in range(100):
        assert not g.tick(m.now_s)
        m.advance(1)
    assert len(tries) == 1  # not again for an hour
    assert states(m) == {"a": "attached"}


def test_a_probe_attached_within_a_window_is_not_charged_for_its_past(machine: Make) -> None:
    m = machine(FakeProbe("a", 3, 0.001, 1))
    m.ran[3] = [5e12, 1e9]  # an hour of earlier use
    late = FakeProbe("late", 9, 0.5, 2)
    m.ran[9] = [9e12, 1e9]
    g = m.governor()
    g.tick(m.now_s)
    m.probes.append(late)
    m.advance(WINDOW_S)
    assert g.tick(m.now_s)
    assert late.state.core_ratio == 0
    assert g.bpf_cores == pytest.approx(0.001)


def test_what_costs_next_to_nothing_waits_for_its_turn(machine: Make) -> None:
    m = machine(FakeProbe("cheap", 1, 0.001, shed=1), FakeProbe("dear", 2, 0.05, shed=9))
    g = m.governor()
    for _ in range(4):
        m.measure(g)
    assert states(m) == {"cheap": "attached", "dear": "shed"}
