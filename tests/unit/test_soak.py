"""The soak's judgement: what is flat, what is a loss, what is explained."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.bench import soak_plan, soak_result
from tests.bench.soak_result import MIB, Record
from tests.bench.soak_slope import slope
from tests.faults.host import registry
from tests.faults.host.fault import HTTP, Launch

HOUR = [10.0 * n for n in range(330)]


def breathing(per_hour: float, seed: int = 3) -> list[float]:
    """100 MiB that rise by so much, with the minutes-long swings that faults make."""
    rng, swing, out = random.Random(seed), 0.0, []
    for at in HOUR:
        swing = 0.9 * swing + rng.gauss(0, 1.0)
        out.append(100 + per_hour * at / 3600 + swing)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat_and_a_leak_is_not(seed: int) -> None:
    flat, leak = slope(HOUR, breathing(0.0, seed)), slope(HOUR, breathing(15.0, seed))
    assert flat is not None
    assert leak is not None
    assert flat.flat
    assert not leak.flat
    assert leak.low < 15 < leak.high
    assert leak.samples == len(HOUR)


def test_a_leak_that_grows_faster_and_faster_is_none_the_less_one() -> None:
    found = slope(HOUR, [100 + (at / 600) ** 2 for at in HOUR])
    assert found is not None
    assert not found.flat


def test_a_short_series_has_no_slope() -> None:
    assert slope(HOUR[:30], breathing(0.0)[:30]) is None


@pytest.mark.parametrize("seconds", [120.0, 3600.0])
def test_happenings(seconds: float) -> None:
    plan = soak_plan.happenings(seconds, 7)
    assert plan == sorted(plan) == soak_plan.happenings(seconds, 7)
    assert all(0 < h.at_s < seconds for h in plan)
    assert [h.details["role"] for h in plan if h.what == "kill"] == ["exporter", "collector"]
    reloads = [h.details["kind"] for h in plan if h.what == "reload"]
    assert set(reloads) == set(soak_plan.RELOADS)
    over = 0.0
    for outage in (h for h in plan if h.what == "outage"):
        assert outage.at_s >= over
        over = outage.at_s + outage.details["seconds"]
        assert over < seconds


def test_every_fault_of_a_soak_is_one_for_its_server() -> None:
    for name in soak_plan.FAULTS:
        fault = registry.load(name)
        assert HTTP in fault.servers
        assert fault.launch == Launch()
    assert sorted(name for name, _, _ in soak_plan.faults(5)) == sorted(soak_plan.FAULTS)


def sample(at_s: float, pss: int = 50 * MIB, pid: int = 7, **more: Any) -> dict[str, Any]:
    process = {"pid": pid, "pss": pss, "pss_anon": pss, "fds": 20, "threads": 2}
    return {
        "at_s": at_s,
        "processes": {"collector": process},
        "store": 0,
        "spool": 0,
        "files": {},
        "unwell": {},
    } | more


def event(at_s: float, what: str, **more: Any) -> dict[str, Any]:
    return {"at_s": at_s, "unix_ns": int((1000 + at_s) * 1e9), "what": what, **more}


def record(**changed: Any) -> Record:
    """Ten requests a second for an hour, all counted, the first of every ten slow and explained and received."""
    ms = 1_000_000
    sent = [
        [f"{n:032x}", n * 100 * ms + 10**9, n * 100 * ms + 10**9 + (500 if n % 10 == 0 else 50) * ms, 200, ""]
        for n in range(36_000)
    ]
    slow = [s[0] for s in sent[::10]]
    usual: dict[str, Any] = {
        "samples": [sample(t) for t in HOUR],
        "events": [event(0.5, "ready", objective_ms=100, pid=1), event(3650, "agent ended", status=0)],
        "sent": sent,
        "found": {trace: [trace, 1, "cpu.runqueue"] for trace in slow},
        "spans": dict.fromkeys(slow, 4),
        "counters": [["a", "requests", "ok", 36_000, 0]],
        "last": {"findings_dropped": {"a": 0}, "sinks": {"otlp": {"traces": {"dropped": 0}}}},
        "log": "",
    }
    return Record(**usual | changed)


def test_a_good_record() -> None:
    result = soak_result.judge(record())
    assert result["failed"] == []
    assert result["ledger"]["slow_by_client"] == result["ledger"]["findings_to_send"] == 3600
    assert result["pss"]["collector 7"]["flat"]


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({"counters": [["a", "requests", "ok", 35_990, 0]]}, "no more requests uncounted than events lost"),
        ({"found": {}}, "slow ones without a finding are counted"),
        ({"spans": {}}, "findings not received are counted"),
        ({"log": "Traceback (most recent call last)"}, "no traceback"),
        ({"log": "exporter killed: restarting in 0.2 s"}, "restarts are those of the kills"),
        ({"samples": [sample(t, store=25 * MIB) for t in HOUR]}, "store within its bound"),
        ({"samples": [sample(t, spool=65 * MIB) for t in HOUR]}, "spool within its bound"),
        (
            {"samples": [sample(t, pss=int((50 + t / 100) * MIB)) for t in HOUR]},
            "PSS of every process flat",
        ),
        ({"events": [event(0.5, "ready", objective_ms=100, pid=1)]}, "it stopped in order"),
        (
            {
                "samples": [sample(t, pid=7 if t < 3000 else 8) for t in HOUR]
            },  # nobody knows whether the last one is
            "PSS of every process flat",
        ),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, Any], failed: str) -> None:
    assert soak_result.judge(record(**changed))["failed"] == [failed]


def test_what_is_counted_as_lost_explains_what_is_missing() -> None:
    counters = [
        ["a", "requests", "ok", 35_990, 0],
        ["a", "lost_events", "sock_recv", 10, 0],
        ["a", "not_explained", "", 3600, 0],
    ]
    assert soak_result.judge(record(counters=counters, found={}))["failed"] == []


def test_nobody_counted_between_a_kill_and_the_next_ready() -> None:
    told = [["a", "requests", "ok", 1, int(1100e9)]]  # 100 s, by the wall clock
    kill = event(101.0, "kill", role="collector", counters=told)
    events = [*record().events, kill, event(105.0, "back", role="collector")]
    counters = [["a", "requests", "ok", 900, 0], ["b", "requests", "ok", 35_000, 0]]
    result = soak_result.judge(record(events=events, counters=counters, log="restarting in"))
    assert result["failed"] == []
    assert result["ledger"]["no_collector_s"] == pytest.approx(105 + 3 - (100 - 3))
    assert 105 <= result["ledger"]["while_no_collector_counted"] <= 120
