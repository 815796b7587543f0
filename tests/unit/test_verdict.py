"""Verdicts: the largest excess over the usual, or unknown, in a sentence."""

from __future__ import annotations

import pytest
from whyspan import verdict
from whyspan.baseline import Baseline
from whyspan.causes import rules
from whyspan.model import UNKNOWN, CgroupFact, Finding, Request

from tests.unit.timeline import HOG, LOOP, NANOSLEEP, EventBuilder, request


def usually(
    latency: float, causes: dict[str, float], ttft: float | None = None, **fields: object
) -> Baseline:
    """Return a baseline of 60 equal requests."""
    b = Baseline()
    for i in range(60):
        first = i * 1000 + (latency if ttft is None else ttft)
        assert b.observe(request(i * 1000, i * 1000 + latency, first_ms=first, **fields), causes)
    return b


def explain(
    b: EventBuilder, wanted: Request, baseline: Baseline | None = None, reason: str = "latency", lost: int = 0
) -> Finding:
    """Walk, classify and explain a slow request."""
    found, ctx = b.classify(wanted)
    return verdict.explain(wanted, found, baseline or Baseline(), reason, lost, ctx)


def preempted(
    waits: list[tuple[float, float]], rival: int = HOG, sleep: tuple[float, float] | None = None
) -> EventBuilder:
    """LOOP runs, but for waits for a CPU that *rival* has and one sleep."""
    b = EventBuilder().into(-5, LOOP)
    for start, end in waits:
        b.out(start, LOOP, 0, next_tid=rival).into(end, LOOP, rival)
    if sleep:
        b.out(sleep[0], LOOP, nr=NANOSLEEP).wake(sleep[1], LOOP, context=1).into(sleep[1], LOOP)
    return b.out(5000, LOOP)


def test_the_largest_excess_is_the_verdict() -> None:
    finding = explain(preempted([(10, 410)]), request(0, 500), usually(100, {"work.cpu": 100}))
    v = finding.verdict
    assert (v.cause, v.excess_ms, v.share) == ("cpu.runqueue", 400, 1)
    assert v.confidence == 1
    assert (v.culprit.kind, v.culprit.name, v.culprit.tgid) == ("process", "hog", HOG)
    assert v.sentence == (
        "Took 500 ms, usually 100 ms; 400 ms more than usual waiting for a CPU that another process used: "
        "process hog (900)."
    )
    assert v.fix.startswith("Try ")
    assert finding.causes == {"cpu.runqueue": 400, "work.cpu": 100}
    assert finding.baseline == {"work.cpu": 100}
    assert finding.baseline_count == 60
    assert finding.wall_ns == finding.accounted_ns == 500_000_000


def test_every_other_cause_is_ruled_out_with_its_check() -> None:
    finding = explain(preempted([(10, 410)]), request(0, 500), usually(100, {"work.cpu": 100}))
    assert {r.cause for r in finding.ruled_out} == {r.id for r in rules()} - {"cpu.runqueue"}
    assert all(r.check for r in finding.ruled_out)


def test_without_a_baseline_absolute_time_counts_and_confidence_is_low() -> None:
    finding = explain(preempted([(10, 410)]), request(0, 500))
    v = finding.verdict
    assert (v.cause, v.excess_ms, v.share, v.confidence) == ("cpu.runqueue", 400, 0.8, 0.5)
    assert "no baseline yet" in v.sentence
    assert any("baseline: none" in line for line in v.evidence)
    assert finding.baseline == {}


def test_a_long_wait_that_is_usual_is_not_a_cause() -> None:
    # 300 ms of run-queue delay as always; what is new is 200 ms of sleep.
    b = preempted([(10, 310)], sleep=(320, 520))
    baseline = usually(400, {"cpu.runqueue": 300, "work.cpu": 100})
    v = explain(b, request(0, 620), baseline).verdict
    assert v.cause == UNKNOWN
    assert "most of the excess is work.timer (200 ms)" in v.sentence
    assert v.evidence[0] == "work.timer: 200.0 ms over the usual"


def test_a_small_real_cause_beside_large_usual_work_is_below_the_floor() -> None:
    b = preempted([(10, 60)], sleep=(100, 400))
    v = explain(b, request(0, 500), usually(150, {"work.cpu": 150})).verdict
    assert (v.cause, v.culprit.name, v.fix) == (UNKNOWN, "", "")


def test_a_real_cause_over_the_floor_wins_although_usual_work_grew_more() -> None:
    b = preempted([(10, 160)], sleep=(200, 400))
    v = explain(b, request(0, 500), usually(150, {"work.cpu": 150})).verdict
    assert v.cause == "cpu.runqueue"
    assert v.share == pytest.approx(150 / 350)


def test_what_was_not_seen_is_unknown_and_not_accounted() -> None:
    b = EventBuilder().into(400, LOOP).out(600, LOOP)
    finding = explain(b, request(0, 500))
    assert finding.verdict.cause == UNKNOWN
    assert finding.accounted_ns == 100_000_000
    assert len(finding.ruled_out) == len(rules())


def test_lost_events_lower_the_confidence() -> None:
    b = preempted([(10, 410)])
    baseline = usually(100, {"work.cpu": 100})
    sure = explain(b, request(0, 500), baseline).verdict
    few = explain(b, request(0, 500), baseline, lost=1)
    many = explain(b, request(0, 500), baseline, lost=100).verdict
    assert sure.confidence > few.verdict.confidence > many.confidence > 0
    assert few.lost_events == 1
    assert "1 events were lost in the window" in few.verdict.evidence


def test_inferred_time_lowers_the_confidence() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 0, flags=6).into(410, LOOP, cpu=1).out(600, LOOP, cpu=1)
    b.known(CgroupFact("/svc/web", 50_000, 100_000))
    v = explain(b, request(0, 500), usually(100, {"work.cpu": 100})).verdict
    assert (v.cause, v.share, v.confidence) == ("cpu.throttled", 1, 0.5)
    assert "0.50 CPUs" in v.sentence


def test_two_causes_are_both_reported_ranked() -> None:
    b = preempted([(10, 210)])
    b.out(300, LOOP, 0, flags=6).into(450, LOOP, throttled_ms=150)
    finding = explain(b, request(0, 500), usually(150, {"work.cpu": 150}))
    assert finding.verdict.cause == "cpu.runqueue"
    (other,) = finding.verdict.others
    assert (other.cause, other.excess_ms, other.culprit.kind) == ("cpu.throttled", 150, "cgroup")
    check = {r.cause: r.check for r in finding.ruled_out}["cpu.throttled"]
    assert check.startswith("150.0 ms on the path, not the largest")


def test_a_slow_first_byte_is_explained_by_what_came_before_it() -> None:
    # 300 of 320 ms to the first byte, then five seconds of ordinary streaming.
    b = preempted([(10, 310)], sleep=(330, 4990))
    finding = explain(b, request(0, 5000, first_ms=320), None, "ttft 320 ms over the objective of 200 ms")
    v = finding.verdict
    assert (finding.phase, v.cause, v.excess_ms) == ("ttft", "cpu.runqueue", 300)
    assert v.sentence.startswith("First byte after 320 ms")


def test_the_usual_of_the_first_byte_is_its_own() -> None:
    baseline = Baseline()
    for i in range(60):
        r = request(i * 1000, i * 1000 + 900, first_ms=i * 1000 + 100)
        baseline.observe(r, {"work.cpu": 100, "work.timer": 800}, {"work.cpu": 20, "work.timer": 80})
    b = preempted([(10, 310)], sleep=(320, 400))
    v = explain(b, request(0, 1000, first_ms=400), baseline, "ttft").verdict
    assert (v.cause, v.excess_ms, v.share) == ("cpu.runqueue", 300, 1)


def test_the_usual_of_the_first_byte_is_estimated_when_it_is_not_known() -> None:
    baseline = usually(1000, {"cpu.runqueue": 500, "work.cpu": 500}, ttft=100)
    v = explain(preempted([(10, 310)]), request(0, 1000, first_ms=320), baseline, "ttft").verdict
    assert (v.cause, v.excess_ms) == ("cpu.runqueue", 250)


def test_the_phase_is_where_the_excess_lies() -> None:
    baseline = usually(200, {"work.cpu": 200}, ttft=100)
    late = explain(preempted([(150, 450)]), request(0, 500, first_ms=100), baseline)
    early = explain(preempted([(50, 350)]), request(0, 500, first_ms=400), baseline)
    none = explain(preempted([(50, 350)]), request(0, 500, head_ns=0, first_ns=0), baseline)
    assert (late.phase, early.phase, none.phase) == ("stream", "ttft", "ttft")


def test_less_than_a_millisecond_is_no_cause() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .out(0.1, LOOP, 0, flags=6)
        .into(0.6, LOOP, throttled_ms=0.5)
        .out(9, LOOP)
    )
    assert explain(b, request(0, 1)).verdict.cause == UNKNOWN


def test_a_request_not_slower_than_usual_has_no_cause() -> None:
    v = explain(preempted([(10, 60)]), request(0, 100), usually(100, {"work.cpu": 100})).verdict
    assert v.cause == UNKNOWN


def test_an_ordinary_request_gets_no_verdict() -> None:
    finding = explain(preempted([(10, 60)]), request(0, 100), usually(100, {"work.cpu": 100}), "")
    assert not finding.slow
    assert finding.verdict.sentence == ""
    assert finding.ruled_out == []
    assert finding.causes["cpu.runqueue"] == 50
