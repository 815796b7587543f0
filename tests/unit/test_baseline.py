"""The baseline: what counts, when it is used, how slowly it moves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from whyspan.baseline import MAX_CLASSES, MIN_COUNT, RESERVOIR, Baseline, class_of, ttft_ms
from whyspan.model import Request

from tests.unit.timeline import request

HOUR = 3_600_000


@dataclass
class Limits:
    """Objectives in ms; 0 means none."""

    ttft_ms: float = 0
    e2e_ms: float = 0


def served(start_ms: float, latency: float, ttft: float | None = None, **fields: Any) -> Request:
    """Return a request of a latency in ms."""
    first = start_ms + (latency if ttft is None else ttft)
    return request(start_ms, start_ms + latency, first_ms=first, **fields)


def filled(count: int = MIN_COUNT, latency: float = 100, cause: str = "work.cpu") -> Baseline:
    """Return a baseline of equal requests, one a second, give or take a ms."""
    b = Baseline()
    for i in range(count):
        assert b.observe(served(i * 1000, latency + i % 3 - 1), {cause: latency + i % 3 - 1})
    return b


def test_no_figures_before_the_fiftieth_request() -> None:
    assert filled(49).usual(served(0, 100)) is None
    usual = filled(50).usual(served(0, 100))
    assert usual is not None
    assert usual.requests == 50
    assert usual.latency_median == 100
    assert usual.causes["work.cpu"] == (100, 1)


def test_a_cause_that_is_usually_absent_is_usually_zero() -> None:
    b = filled(49)
    b.observe(served(50_000, 100), {"cpu.throttled": 90, "work.cpu": 10})
    usual = b.usual(served(0, 100))
    assert usual is not None
    assert usual.causes["cpu.throttled"] == (0, 0)


def test_classes_are_apart_by_service_and_size() -> None:
    b = filled()
    assert b.usual(served(0, 100, service="other")) is None
    assert b.usual(served(0, 100, chunks=64)) is None
    assert b.usual(served(0, 100, request_bytes=70_000)) is None


@pytest.mark.parametrize(
    ("a", "b", "same"), [(0, 0, True), (1, 3, True), (3, 4, False), (4, 15, True), (15, 16, False)]
)
def test_sizes_are_bucketed_in_powers_of_four(a: int, b: int, same: bool) -> None:
    assert (class_of(served(0, 1, chunks=a)) == class_of(served(0, 1, chunks=b))) is same
    assert (class_of(served(0, 1, request_bytes=a)) == class_of(served(0, 1, request_bytes=b))) is same


@pytest.mark.parametrize(
    "fields", [{"outcome": "reset"}, {"outcome": "killed"}, {"status": 503}, {"status": 429}]
)
def test_failed_requests_do_not_count(fields: dict[str, Any]) -> None:
    assert not Baseline().observe(served(0, 100, **fields), {})


def test_slow_requests_never_count() -> None:
    b = filled()
    before = json.dumps(b.to_dict())
    assert not b.observe(served(0, 500), {"cpu.throttled": 400})
    assert json.dumps(b.to_dict()) == before


def test_slow_by_objective() -> None:
    b = Baseline()
    assert b.is_slow(served(0, 300, 40), Limits(e2e_ms=300)) is None
    assert b.is_slow(served(0, 301, 40), Limits(e2e_ms=300)) == "latency 301 ms over the objective of 300 ms"
    assert b.is_slow(served(0, 301, 40), Limits(ttft_ms=30)) == "ttft 40 ms over the objective of 30 ms"


def test_slow_for_its_class_is_above_p99_and_twice_the_median() -> None:
    b = Baseline()
    for i in range(100):
        b.observe(served(i, 180 if i % 20 == 0 else 100, 10), {})
    assert b.is_slow(served(0, 190, 10), Limits()) is None  # above P99, not twice the median
    slow = b.is_slow(served(0, 210, 10), None)
    assert slow is not None
    assert slow.startswith("latency 210 ms above its class's P99")
    slow = b.is_slow(served(0, 150, 30), None)
    assert slow is not None
    assert slow.startswith("ttft 30 ms")


def test_an_objective_that_is_met_beats_the_class() -> None:
    b = filled()
    assert b.is_slow(served(0, 300), Limits(ttft_ms=1000, e2e_ms=1000)) is None
    assert b.is_slow(served(0, 300), None) is not None


def test_twice_the_median_but_below_p99_is_not_slow() -> None:
    b = Baseline()
    for i in range(49):
        b.observe(served(i, 400 if i % 10 == 0 else 100), {})
    b.observe(served(50, 100), {})
    assert b.is_slow(served(0, 390), None) is None


def test_a_lasting_fault_is_learnt_by_at_most_five_percent_an_hour() -> None:
    b = filled(RESERVOIR)
    at = RESERVOIR * 1000.0
    first = b.usual(served(0, 1))
    assert first is not None
    last = first.latency_median
    for hour in range(1, 6):
        for i in range(600):
            b.observe(served(at + i * HOUR / 600, 190), {"cpu.runqueue": 90, "work.cpu": 100})
        at += HOUR
        usual = b.usual(served(0, 1))
        assert usual is not None
        assert (
            usual.latency_median <= last * 1.05 ** (1 + 16 / 600) + 1e-9
        )  # it moves with every 16th request
        assert usual.latency_median > last
        assert usual.causes["cpu.runqueue"][0] <= 5.2 * 1.05**hour * hour
        last = usual.latency_median


def test_a_silence_gives_no_credit_beyond_one_hour() -> None:
    b = filled(RESERVOIR)
    for i in range(15):  # the figures move with every 16th request
        b.observe(served(1000 * HOUR + i, 190), {})
    kept = b._classes["svc|0|0"].samples
    kept.extend([kept[-1]] * RESERVOIR)
    b.observe(served(2000 * HOUR, 190), {})
    usual = b.usual(served(0, 1))
    assert usual is not None
    assert usual.latency_median == pytest.approx(105)


def test_survives_a_restart_and_a_clock_that_begins_anew() -> None:
    b = filled(200)
    again = Baseline.from_dict(json.loads(json.dumps(b.to_dict())))
    assert again.usual(served(0, 1)) == b.usual(served(0, 1))
    for i in range(64):
        again.observe(served(i, 180), {})
    usual = again.usual(served(0, 1))
    assert usual is not None
    assert usual.latency_median == pytest.approx(100, abs=0.1)


def test_another_version_is_not_read() -> None:
    assert Baseline.from_dict({"version": 99, "classes": {"x": 1}}).to_dict()["classes"] == {}


def test_bounded_in_classes_and_samples() -> None:
    b = filled(RESERVOIR + 100)
    for i in range(MAX_CLASSES):
        b.observe(served(0, 100, service=f"s{i}"), {})
    assert len(b._classes) == MAX_CLASSES
    assert b.usual(served(0, 100)) is None  # its class was the one used longest ago
    assert len(filled(RESERVOIR + 100)._classes["svc|0|0"].samples) == RESERVOIR


def test_no_first_byte_has_no_ttft() -> None:
    assert ttft_ms(served(0, 10, first_ns=0, head_ns=0)) == -1
    assert ttft_ms(served(0, 10, 4)) == 4
