"""The core as a whole: batches in, findings out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import slices
from whyspan.baseline import Baseline
from whyspan.config import Objectives
from whyspan.engine import Engine, Settings
from whyspan.model import Batch, CgroupFact, Finding, ProcessFact, Segment

from tests.unit.lossy import lossy_events
from tests.unit.timeline import COOKIE, EPOLL_WAIT, FSYNC, HOG, LOOP, MS, NANOSLEEP, WORKER, D, ns, request
from tests.unit.wire import SCHEMA, TCP_CLOSE_WAIT, TCP_LAST_ACK, Wire, assert_tiles

S = 1000.0


def engine(e2e_ms: float = 100, baseline: Baseline | None = None, **over: Any) -> Engine:
    limits = Objectives(e2e_ms=e2e_ms)
    return Engine(SCHEMA, Settings(objectives=lambda _: limits, instance="i", **over), baseline)


def run(e: Engine, batches: Iterable[Batch]) -> list[Finding]:
    return [f for b in batches for f in e.feed(b)]


def ordinary_then_slow() -> Wire:
    """Sixty requests of 20 ms, five a second, and one of 300 ms that a hog held up."""
    w = Wire()
    for i in range(60):
        w.served(100 + 200 * i, 20, seq=i)
    return w.hindered(12_500, 300, seq=60)


def every(step_ms: float, until_ms: float) -> list[float]:
    return [step_ms * (k + 1) for k in range(int(until_ms / step_ms))]


def test_an_ordinary_and_a_slow_request() -> None:
    e = engine(ordinary_per_s=10)
    found = run(e, ordinary_then_slow().batches(*every(250, 13_500)))
    assert [f.request.seq for f in found] == list(range(61))
    for f in found:
        assert_tiles(f)
    usual, slow = found[0], found[-1]
    assert not usual.slow
    assert (usual.verdict.cause, usual.verdict.sentence, usual.ruled_out) == ("unknown", "", [])
    assert usual.wall_ns == usual.accounted_ns == 20 * MS
    assert usual.causes == pytest.approx({"work.cpu": 20})
    assert slow.slow
    assert slow.slow_reason == "latency 300 ms over the objective of 100 ms"
    assert slow.baseline_count == 60
    assert slow.verdict.cause == "cpu.runqueue"
    assert slow.verdict.excess_ms == pytest.approx(298, abs=1)
    assert (slow.verdict.culprit.name, slow.verdict.culprit.tgid) == ("hog", HOG)
    assert "hog" in slow.verdict.sentence
    assert slow.accounted_ns == slow.wall_ns == 300 * MS
    assert {r.cause for r in slow.ruled_out}
    assert slow.verdict.cause not in {r.cause for r in slow.ruled_out}
    assert e.counts == {("requests", "svc", "ok"): 61}
    assert e.open_count() == 0


def test_failed_requests_are_explained_without_an_objective() -> None:
    w = Wire().served(10, 5, seq=0).served(20, 5, seq=1, status=503)
    e = engine(e2e_ms=0, ordinary_per_s=0)
    (f,) = run(e, w.batches(250))
    assert (f.request.seq, f.request.outcome, f.slow) == (1, "error", False)
    assert (f.verdict.cause, f.verdict.sentence) == (
        "unknown",
        "Failed with 503 after 5 ms; no baseline yet.",
    )
    assert f.ruled_out
    assert e.counts["requests", "svc", "error"] == 1


def test_a_failed_request_that_took_no_longer_than_usual() -> None:
    e = engine(e2e_ms=0, ordinary_per_s=100)
    run(e, ordinary_then_slow().batches(*every(250, 12_000)))
    w = Wire().served(13_000, 20, seq=61, status=429).ask(13_100, seq=62).state(13_103, aux=1)
    early, late = run(e, w.batches(13_250, facts=False))
    assert early.verdict.sentence == "Failed with 429 after 20 ms; no cause takes more time than usual."
    assert late.verdict.sentence == (
        "The client reset the connection after 3 ms, before any answer; no cause takes more time than usual."
    )
    for f in (early, late):
        assert_tiles(f)
        assert (f.slow, f.verdict.cause, f.verdict.confidence) == (False, "unknown", 0)
        assert f.baseline_count == 60


def killed_while_throttled(end_ms: float = 5000) -> Wire:
    """The loop hands a request to its worker, which a quota stops most of the time until the process is killed."""
    w = Wire().woken(10).ask(10)
    w.into(-30, WORKER, cpu=1).out(-25, WORKER, cpu=1)
    w.wake(11, WORKER, LOOP).into(12, WORKER, cpu=1).out(13, LOOP, nr=EPOLL_WAIT)
    for k in range(int(end_ms / 100)):
        at, spent = 100.0 * k, 85 * k
        w.out(at + 15, WORKER, 0, flags=3, cpu=1, throttled_ms=spent)
        w.into(at + 100, WORKER, cpu=1, throttled_ms=spent + 85)
    # The signal wakes the loop, too.
    w.wake(end_ms + 9, LOOP, HOG).into(end_ms + 9.5, LOOP).out(end_ms + 20, LOOP).out(
        end_ms + 20, WORKER, cpu=1
    )
    w.known(CgroupFact("/svc/web", 15_000, 100_000))
    return w.exit(end_ms + 10)


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("end", ["killed", "left"])
def test_a_request_that_failed_while_its_worker_was_throttled_names_the_quota(learnt: bool, end: str) -> None:
    w = killed_while_throttled()
    if end == "left":
        w.rows = [r for r in w.rows if r[0] != ns(5010)]
        w.state(5009, TCP_CLOSE_WAIT).state(5010, TCP_LAST_ACK)
    e = engine(e2e_ms=0, explain_per_s=100, baseline=usual_of(20) if learnt else None)
    found = run(e, w.batches(*every(250, 7000)))
    f = found[-1]
    assert_tiles(f)
    v = f.verdict
    assert (f.slow, v.cause, v.culprit.name) == (True, "cpu.throttled", "/svc/web")
    assert v.excess_ms == pytest.approx(50 * 85, rel=0.02)  # it is walked in two slices
    assert 0.35 < v.confidence <= 0.5  # the worker is inferred
    start = "Process 100 (server) was killed by signal 9 (SIGKILL) after 5000 ms, before any answer. "
    if end == "left":
        start = "The client closed the connection after 4999 ms, before any answer. "
    usually = "usually the first after 20 ms" if learnt else "(no baseline yet)"
    assert v.sentence.startswith(start + "No byte of an answer in 5000 ms")
    assert usually in v.sentence
    assert "waiting for CPU quota: cgroup /svc/web" in v.sentence


def test_a_hang_of_minutes_behind_a_throttled_worker_names_the_quota() -> None:
    # It is walked in slices: only the first has seen to whom the request was given.
    e = engine(e2e_ms=1500)
    early, f = run(e, killed_while_throttled(90_000).batches(*every(1000, 92_000)))
    for finding in (early, f):
        assert_tiles(finding)
        assert finding.verdict.cause == "cpu.throttled"
    assert f.causes["cpu.throttled"] == pytest.approx(0.85 * 90_000, rel=0.01)


def usual_of(latency_ms: float) -> Baseline:
    """Return a baseline of requests without a body."""
    b = Baseline()
    for i in range(60):
        b.observe(request(i * 1000, i * 1000 + latency_ms), {"work.cpu": latency_ms})
    return b


def test_a_dead_worker_is_told_where_the_front_end_answers_or_hangs() -> None:
    w = Wire().known(ProcessFact(200, "EngineCore", service="svc"))
    assert isinstance(w, Wire)
    w.served(100, 200, status=500).ask(100, cookie=5).exit(150, 200)
    w.state(2500, TCP_CLOSE_WAIT, cookie=5).state(2501, TCP_LAST_ACK, cookie=5)
    answered, hung = run(engine(e2e_ms=0), w.batches(*every(250, 4000)))
    died = (
        "50 ms after its start process 200 (EngineCore) of the same service was killed by signal 9 (SIGKILL)"
    )
    assert answered.verdict.sentence == f"Failed with 500 after 200 ms; {died}; no baseline yet."
    assert hung.verdict.sentence.startswith(
        f"The client closed the connection after 2400 ms, before any answer; {died}. No byte of an answer in"
    )
    for f in (answered, hung):
        assert died in f.verdict.evidence


def test_an_open_request_tells_of_a_dead_worker() -> None:
    w = Wire().known(ProcessFact(200, "EngineCore", service="svc"))
    assert isinstance(w, Wire)
    w.ask(100).exit(150, 200)
    (f,) = run(engine(e2e_ms=1500), w.batches(*every(250, 4000)))
    assert f.request.outcome == "open"
    assert any("(EngineCore) of the same service was killed" in line for line in f.verdict.evidence)


def test_a_storm_of_failures_takes_nothing_from_the_slow_ones() -> None:
    w = Wire()
    for cookie in range(1000):
        w.ask(0.1 * cookie, cookie=cookie).done(0.1 * cookie + 3, 429, cookie=cookie)
    for cookie in range(1000, 1005):
        w.ask(0, cookie=cookie).done(200, cookie=cookie)
    w.ask(0, cookie=2000).done(180, 503, cookie=2000).ask(0, cookie=2001).state(190, aux=1, cookie=2001)
    e = engine(explain_per_s=5, ordinary_per_s=0)
    found = run(e, w.batches(300))
    slow = [f for f in found if f.request.outcome == "ok"]
    failures = [f.request for f in found if f.request.outcome != "ok"]
    assert len(slow) == 5
    assert len(failures) == 5
    # Nor from the rare kinds among the failures.
    assert {503, 0} <= {r.status for r in failures}
    assert e.counts == {
        ("requests", "svc", "ok"): 5,
        ("requests", "svc", "error"): 1001,
        ("requests", "svc", "reset"): 1,
        ("not_explained", "svc", "failed"): 997,
    }


def test_only_what_ended_before_the_drain_began_is_explained() -> None:
    # The rings are read one after the other: what is newer than the drain may be incomplete.
    w = Wire().hindered(10, 200)
    (batch,) = w.batches(220)
    early = Batch(ns(205), batch.events, batch.heads, batch.facts)
    e = engine()
    assert e.feed(early) == []
    assert e.counts == {}
    (f,) = e.feed(Batch(ns(455), batch.events[:0]))
    assert f.request.end_ns == ns(210)
    assert f.verdict.cause == "cpu.runqueue"
    assert e.feed(Batch(ns(705), batch.events[:0])) == []


def test_flush_explains_what_was_still_waiting() -> None:
    (batch,) = Wire().hindered(10, 200).batches(220)
    e = engine()
    assert e.feed(Batch(ns(205), batch.events, batch.heads, batch.facts)) == []
    assert [f.request.end_ns for f in e.flush(ns(205))] == [ns(210)]
    assert e.flush(ns(205)) == []


def crowd(order: list[int]) -> list[Batch]:
    """Sixty slow connections in one batch, that end in the given order, ever later and longer."""
    w = Wire()
    for k, cookie in enumerate(order):
        w.ask(0, cookie=cookie).done(200 + k, cookie=cookie)
    return w.batches(300)


def test_explanations_are_limited_and_the_rest_is_counted() -> None:
    e = engine(explain_per_s=5)
    found = run(e, crowd(list(range(60))))
    assert len(found) == 5
    assert e.counts["not_explained", "svc", ""] == 55
    assert e.counts["requests", "svc", "ok"] == 60
    # The bucket fills with the batches' own clock, at its rate and no higher than a second's worth.
    for now_s, expected in ((1.3, 5), (1.5, 1), (100, 5)):
        w = Wire()
        for cookie in range(20):
            w.ask(now_s * S - 150, cookie=cookie).done(now_s * S - 1, cookie=cookie)
        assert len(run(e, w.batches(now_s * S, facts=False))) == expected


def test_what_a_batch_has_no_time_for_waits_for_the_next_but_not_for_ever() -> None:
    left = 0

    def allows() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    limits = Objectives(e2e_ms=100)
    e = Engine(SCHEMA, Settings(lambda _: limits, "i", explain_per_s=60), allows=allows)
    left = 10
    (batch,) = crowd(list(range(60)))
    found = e.feed(batch)
    left = 20
    found += e.feed(Batch(ns(550), batch.events[:0]))
    assert len(found) == 30
    assert ("not_explained", "svc", "") not in e.counts
    # What comes meanwhile is asked about first.
    w = Wire().ask(600, cookie=99).done(800, cookie=99)
    left = 2
    found += (newest := run(e, w.batches(900, facts=False)))
    assert 99 in {f.request.cookie for f in newest}
    assert len({f.request.cookie for f in found}) == len(found) == 32
    left = 1
    found += e.feed(Batch(ns(30 * S), batch.events[:0]))
    assert len(found) == 32
    assert e.counts["not_explained", "svc", ""] == 29


def test_a_storm_of_failures_keeps_no_slow_request_waiting() -> None:
    left = 0

    def allows() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    w = Wire()
    for k in range(20):
        w.ask(100 + k, cookie=100 + k).done(300 + k, cookie=100 + k, status=503)
    for k in range(4):
        w.ask(120 + k, cookie=200 + k).done(330 + k, cookie=200 + k)
    w.ask(130, cookie=300).done(335, cookie=300, status=500)
    e = Engine(
        SCHEMA,
        Settings(lambda _: Objectives(e2e_ms=100), "i", explain_per_s=60, ordinary_per_s=0),
        allows=allows,
    )
    left = 8
    found = run(e, w.batches(500))
    first = [f.request for f in found]
    assert sum(r.status == 200 for r in first) == 4
    # Of each kind of failure the first few are as urgent.
    assert sum(r.status == 500 for r in first) == 1
    assert sum(r.status == 503 for r in first) == 3
    left = 100
    found += e.feed(Batch(ns(600), w.batches(500)[0].events[:0]))
    assert len(found) == 25


def test_what_is_usual_is_learnt_before_the_failures_of_the_same_batch() -> None:
    w = Wire()
    for k in range(60):
        w.ask(10 * k, cookie=k + 1).done(10 * k + 8, cookie=k + 1)
    w.ask(700, cookie=100).done(708, cookie=100, status=503)
    e = Engine(SCHEMA, Settings(lambda _: Objectives(), "i", explain_per_s=60, ordinary_per_s=1000))
    (failed,) = [f for f in run(e, w.batches(900)) if f.request.status == 503]
    assert failed.baseline_count == 60


def test_who_is_explained_depends_on_neither_order_nor_length() -> None:
    cookies = list(range(60))
    chosen = set()
    for seed in range(4):
        random.Random(seed).shuffle(cookies)
        found = run(engine(explain_per_s=5), crowd(cookies))
        chosen.add(frozenset(f.request.cookie for f in found))
    assert len(chosen) == 1
    # Over many crowds, early and late ends are chosen alike: neither half has less than a third.
    late = total = 0
    for first in range(0, 3000, 60):
        for f in run(engine(explain_per_s=5), crowd(list(range(first, first + 60)))):
            total += 1
            late += f.request.end_ns >= ns(230)
    assert total == 250
    assert total / 3 < late < 2 * total / 3


def test_one_service_does_not_eat_the_others_explanations() -> None:
    w = Wire()
    for cookie in range(40):
        w.ask(0, cookie=cookie).done(200, cookie=cookie)
    w.ask(0, cookie=99, tgid=HOG, tid=HOG).done(200, cookie=99, tid=HOG)
    found = run(engine(explain_per_s=3), w.batches(300))
    assert sorted(f.request.service for f in found) == ["hog", "svc", "svc", "svc"]


def test_ordinary_requests_are_sampled() -> None:
    w = Wire()
    for i in range(100):
        w.served(10 * i + 5, 3, seq=i)
    found = run(engine(ordinary_per_s=1), w.batches(*every(250, 1000)))
    # While there is no baseline five a second are looked at, with a burst of as many.
    assert 8 <= len(found) <= 10
    assert not any(f.slow for f in found)
    assert run(engine(ordinary_per_s=0), w.batches(*every(250, 1000))) == []


def test_an_open_request_is_reported_once_past_its_objective() -> None:
    w = Wire().woken(10).ask(10)
    w.out(20, LOOP, nr=EPOLL_WAIT).wake(5990, LOOP, context=1).into(5991, LOOP)
    w.send(6000, LOOP).out(6001, LOOP, nr=EPOLL_WAIT)
    w.done(6000)
    e = engine(e2e_ms=1500)
    reports: dict[float, list[Finding]] = {}
    for now_ms, b in zip(every(250, 7000), w.batches(*every(250, 7000)), strict=True):
        found = e.feed(b)
        if found:
            reports[now_ms] = found
    assert len(reports) == 2
    (seen_ms, (early,)), (end_ms, (late,)) = reports.items()
    assert 1510 < seen_ms <= 2600  # it is looked at every second
    assert (early.request.outcome, early.request.end_ns, early.slow) == ("open", ns(seen_ms), True)
    assert "still open" in early.slow_reason
    assert early.request.trace_id == late.request.trace_id
    assert (end_ms, late.request.outcome, late.wall_ns) == (6000, "ok", 5990 * MS)
    for f in (early, late):
        assert_tiles(f)
        assert f.accounted_ns == f.wall_ns
    assert e.counts == {("requests", "svc", "ok"): 1}


@pytest.mark.parametrize("minutes", [2, 10])
def test_a_hang_of_minutes_in_one_call_is_that_call(minutes: int) -> None:
    # Nothing happens for longer than the window: the last thing seen of the thread has left the recorder.
    last_ms = minutes * 60_000
    w = Wire().woken(10).ask(10)
    w.out(20, LOOP, D, nr=FSYNC, arg0=7).add("fd_block", 20, LOOP, aux=1, fd=7, inode=99, syscall_nr=FSYNC)
    for at in range(1000, last_ms, 1000):  # others go on
        w.wake(at, WORKER, context=1).into(at + 1, WORKER, cpu=1).out(at + 2, WORKER, nr=NANOSLEEP, cpu=1)
    w.wake(last_ms, LOOP, context=3).into(last_ms + 1, LOOP).send(last_ms + 9, LOOP)
    w.done(last_ms + 10)
    early, f = run(engine(e2e_ms=1500), w.batches(*every(1000, last_ms + 2000)))
    assert (early.request.outcome, f.request.outcome) == ("open", "ok")
    assert_tiles(f)
    assert f.accounted_ns == f.wall_ns
    waits = [s for s in f.segments if s.state == "blocked"]
    assert sum(s.end_ns - s.start_ns for s in waits) == (last_ms - 20) * MS
    assert all("fsync" in s.detail for s in waits)
    assert len(waits) > minutes  # it was sliced


def test_a_request_that_never_ends_without_objective_is_not_reported() -> None:
    assert run(engine(e2e_ms=0), Wire().ask(10).batches(*every(1000, 100_000))) == []


@pytest.mark.parametrize("end", ["done", "reset", "killed"])
def test_a_ten_minute_stream_is_explained_in_slices(end: str) -> None:
    # The window is a minute: what happened before it is gone by the time the request ends.
    w = Wire().woken(100).ask(100).status(100.2)
    w.out(100.5, LOOP, nr=NANOSLEEP)
    last_ms = 600_000
    for at in range(250, last_ms, 250):
        w.wake(at, LOOP, context=1).into(at + 0.5, LOOP).send(at + 5, LOOP)
        w.out(at + 6, LOOP, nr=NANOSLEEP)
    if end == "done":
        w.done(last_ms - 245, first_ms=255, chunks=2400)
    elif end == "reset":
        w.state(last_ms - 1.25)
    else:
        w.add("sched_exit", last_ms - 1.25, LOOP, aux=1)
    e = engine(e2e_ms=1000, window_ns=60_000 * MS)
    found = run(e, w.batches(*every(1000, last_ms + 1000)))
    early, f = found
    assert (early.request.outcome, len(found)) == ("open", 2)
    assert f.request.outcome == {"done": "ok"}.get(end, end)
    assert_tiles(f)
    assert f.wall_ns == ns(last_ms - (245 if end == "done" else 1.25)) - ns(100)
    assert len(f.segments) <= slices.MAX_SEGMENTS
    # Every slice was explained while its events were there.
    assert f.accounted_ns > 0.999 * f.wall_ns
    assert f.causes["work.timer"] == pytest.approx(244.5 * 2399, rel=0.01)
    assert f.causes["work.cpu"] == pytest.approx(5.5 * 2399, rel=0.05)
    assert e.open_count() == 0


def test_a_stream_that_outlives_the_recorders_bytes_still_tiles() -> None:
    w = Wire().woken(100).ask(100)
    w.out(101, LOOP, nr=NANOSLEEP)
    for at in range(110, 60_000, 10):
        w.wake(at, LOOP, context=1).into(at + 0.1, LOOP).out(at + 2, LOOP, nr=NANOSLEEP)
    w.done(59_991)
    e = engine(recorder_bytes=100_000)  # some six seconds of it
    *_, f = run(e, w.batches(*every(250, 61_000)))
    assert_tiles(f)
    assert f.request.outcome == "ok"
    assert f.accounted_ns > 0.9 * f.wall_ns


def segment(start: int, ns_: int, cause: str = "a") -> Segment:
    return Segment(start_ns=start, end_ns=start + ns_, tgid=1, tid=1, thread="t", state="s", cause=cause)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=400), st.integers(1, 50))
def test_compaction_keeps_the_tiling_and_the_limit(lengths: list[int], limit: int) -> None:
    at, whole = 7, []
    for i, n in enumerate(lengths):
        whole.append(segment(at, n, f"{i}"))
        at += n
    before = msgspec.json.encode(whole)
    out = slices.compact(whole, limit)
    assert len(out) <= max(limit, 1)
    assert (out[0].start_ns, out[-1].end_ns) == (7, at)
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(out))
    assert msgspec.json.encode(whole) == before  # what was given is left alone
    if len(whole) <= limit:
        assert out == whole


def test_compaction_keeps_the_label_of_the_longer() -> None:
    assert [s.cause for s in slices.compact([segment(0, 100, "a"), segment(100, 5000, "b")], 1)] == ["b"]


def contradictory(draw: st.DrawFn) -> tuple[list[Batch], int]:
    w = Wire()
    w.rows = list(draw(lossy_events()).rows)
    moment = st.integers(-10, 700).map(lambda tenth: tenth / 10)
    for _ in range(draw(st.integers(0, 8))):
        ms, cookie, seq = draw(moment), draw(st.sampled_from((COOKIE, 8))), draw(st.integers(0, 1))
        what = draw(st.sampled_from(("ask", "ask", "status", "done", "state", "exit", "lost", "unread")))
        if what == "ask":
            w.ask(ms, cookie, seq, first_ns=ns(ms - draw(st.integers(0, 20))))
        elif what == "status":
            w.status(ms, 200, cookie, seq)
        elif what == "done":
            flags = draw(st.integers(0, 3))
            w.done(ms, draw(st.sampled_from((0, 200, 503))), cookie, seq, first_ms=draw(moment), flags=flags)
        elif what == "state":
            new, old = draw(st.integers(1, 11)), draw(st.integers(1, 11))
            w.state(ms, new, cookie, draw(st.integers(0, 1)), old_state=old, error=draw(st.integers(0, 110)))
        elif what == "unread":
            w.unread(ms, draw(moment), cookie, seq)
        elif what == "exit":
            w.add("sched_exit", ms, LOOP, aux=1)
        else:
            w.add("http_head_lost", ms, LOOP, aux=draw(st.integers(1, 2)), cookie=cookie)
    cuts = sorted(draw(st.lists(moment, max_size=4)))
    batches = w.batches(*cuts, 71, 10_000, 20_000)
    for b in batches:
        b.lost = draw(st.dictionaries(st.sampled_from(("sched_wake", "sock_recv")), st.integers(1, 9)))
    return batches, draw(st.sampled_from((500, 5_000, 1 << 20)))


@settings(max_examples=80, deadline=None)
@given(st.composite(contradictory)())
def test_contradictory_batches_never_raise_and_always_tile(drawn: tuple[list[Batch], int]) -> None:
    batches, recorder_bytes = drawn
    e = engine(e2e_ms=5, recorder_bytes=recorder_bytes, explain_per_s=100, ordinary_per_s=100)
    found = run(e, batches)
    found += e.flush(batches[-1].now_ns)
    for f in found:
        assert_tiles(f)
        assert f.lost_events >= 0
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(f), type=Finding) == f
    ended = sum(n for (name, _, _), n in e.counts.items() if name == "requests")
    lost = sum(n for (name, _, label), n in e.counts.items() if label == "lost")
    finished = [f for f in found if f.request.outcome != "open"]
    skipped = sum(n for (name, _, _), n in e.counts.items() if name == "not_explained")
    assert len(finished) + skipped + lost == ended


def test_the_same_batches_give_the_same_findings() -> None:
    def once() -> bytes:
        e = engine(explain_per_s=5)
        batches = [*ordinary_then_slow().batches(*every(250, 13_500)), *crowd(list(range(60)))]
        return msgspec.json.encode(run(e, batches))

    assert once() == once()


def test_explained_together_or_apart_it_is_the_same() -> None:
    # Requests that end in one batch share their timelines.
    w = Wire()
    for i in range(8):
        w.hindered(200 * i + 10, 120 + 5 * i, cookie=i)
    together = run(engine(explain_per_s=100), w.batches(2000))
    apart = run(engine(explain_per_s=100), w.batches(*every(200, 2000)))
    assert len(together) == 8
    for a, b in zip(together, apart, strict=True):
        assert (a.request, a.segments, a.causes) == (b.request, b.segments, b.causes)
        assert a.verdict == b.verdict


def test_lost_events_lower_the_confidence_and_are_told() -> None:
    def verdict(lost: dict[str, int]) -> Finding:
        batches = ordinary_then_slow().batches(*every(250, 13_500))
        batches[-4].lost = lost
        return run(engine(), batches)[-1]

    whole, torn = verdict({}), verdict({"sched_wake": 40, "sock_recv": 2})
    assert (whole.lost_events, torn.lost_events) == (0, 42)
    assert torn.verdict.cause == whole.verdict.cause
    assert torn.verdict.confidence < whole.verdict.confidence
