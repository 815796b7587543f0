"""The baseline: what counts, when it is used, how slowly it moves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from whyspan.baseline import MAX_CLASSES, MIN_COUNT, RESERVOIR, Baseline, class_of
from whyspan.latency import ttft_ms
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


def failed(latency: float, **fields: Any) -> Request:
    """Return a request that ended without a byte, unless *fields* say that it had some."""
    none: dict[str, Any] = {"outcome": "reset", "status": 0, "head_ns": 0, "first_ns": 0}
    return request(0, latency, **none | fields)


def of_sizes(*sizes: tuple[int, int, float, float]) -> Baseline:
    """Return a baseline with classes of (chunks, request bytes, latency, ttft)."""
    b = Baseline()
    for chunks, size, latency, ttft in sizes:
        for i in range(MIN_COUNT):
            r = served(i * 1000, latency, ttft, chunks=chunks, request_bytes=size)
            assert b.observe(r, {"work.cpu": latency})
    return b


def test_failed_requests_never_update_the_baseline() -> None:
    b = filled()
    for outcome in ("error", "reset", "killed"):
        assert not b.observe(served(60_000, 100, outcome=outcome), {"work.cpu": 100})
    assert not b.observe(served(60_000, 100, status=404), {"work.cpu": 100})
    assert b.usual(served(0, 100)).requests == 50  # type: ignore[union-attr]


def test_a_wait_in_vain_is_measured_by_the_latest_first_byte() -> None:
    b = of_sizes((1, 300, 900, 700), (64, 300, 600, 40), (1, 0, 5, 5))
    usual = b.usual(failed(500, request_bytes=300))
    assert usual is not None
    assert usual.ttft_median == 700  # it may have been one that is not streamed
    assert b.is_slow(failed(1300, request_bytes=300), None) is None
    reason = b.is_slow(failed(1500, request_bytes=300), None)
    assert reason is not None and reason.startswith("ttft 1500 ms above its class's")
    # Without one of its size any other will do.
    usual = b.usual(failed(500, request_bytes=30_000))
    assert usual is not None
    assert usual.ttft_median == 700
    assert b.usual(failed(500, service="other")) is None


def test_a_part_of_a_response_is_measured_by_a_larger_one() -> None:
    b = of_sizes((64, 0, 600, 40), (300, 0, 3000, 40))
    begun: dict[str, Any] = {"status": 200, "chunks": 14, "first_ns": request(0, 40).end_ns}
    usual = b.usual(failed(500, **begun))
    assert usual is not None
    assert usual.latency_median == 600  # no class of 4 to 15 chunks: the next
    assert b.is_slow(failed(1100, **begun), None) is None
    reason = b.is_slow(failed(1300, **begun), None)
    assert reason is not None and reason.startswith("latency 1300 ms")
    assert b.usual(failed(500, **begun | {"chunks": 5000})) is None  # longer than all that are known
    # A whole one is measured by its own class only.
    assert b.usual(served(0, 500, chunks=14)) is None


def test_a_class_that_gets_its_figures_later_is_seen() -> None:
    b = of_sizes((64, 0, 600, 40))
    assert b.usual(failed(500)).ttft_median == 40  # type: ignore[union-attr]
    for i in range(MIN_COUNT):
        b.observe(served(i * 1000, 300, chunks=1), {})
    assert b.usual(failed(500)).ttft_median == 300  # type: ignore[union-attr]


def test_without_any_measure_a_failed_request_that_waited_a_second_is_slow() -> None:
    b = Baseline()
    assert b.is_slow(failed(999), Limits()) is None
    assert b.is_slow(failed(5000), Limits()) == "ttft 5000 ms of a failed request, and no baseline yet"
    assert b.is_slow(served(0, 5000, 4000, outcome="error", status=500), None) is not None
    assert b.is_slow(served(0, 50_000, 40, outcome="reset"), None) is None  # a stream that was left
    assert b.is_slow(failed(5000), Limits(e2e_ms=9000)) is None  # there is a measure
    assert b.is_slow(served(0, 5000), None) is None  # it did not fail


def test_a_wait_in_vain_counts_against_the_objective_for_the_first_byte() -> None:
    assert ttft_ms(failed(300)) == 300
    assert Baseline().is_slow(failed(300), Limits(ttft_ms=200)) == "ttft 300 ms over the objective of 200 ms"
    assert ttft_ms(request(0, 300, outcome="open", head_ns=0, first_ns=0)) == -1
