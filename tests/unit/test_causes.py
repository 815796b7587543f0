"""Rules: what is claimed, what is not, and who is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.causes import Context, Rule, classify, rule_out, rules
from whyspan.critical_path import NET_RX
from whyspan.model import CgroupFact, ProcessFact

from tests.unit.lossy import lossy_events
from tests.unit.timeline import (
    COOKIE,
    EPOLL_WAIT,
    HOG,
    LOOP,
    NANOSLEEP,
    SERVER,
    WORKER,
    EventBuilder,
    ms_of,
    request,
)


def on_cpu_with_a_wait(out: dict[str, int], into: dict[str, int]) -> EventBuilder:
    """LOOP runs 0-10, is off the CPU 10-60 although it wants it, and runs to 110. It never rests in a poll."""
    b = EventBuilder().into(-5, LOOP)
    b.tgids[110] = SERVER
    b.out(10, LOOP, 0, **out).into(60, LOOP, **into)
    return b.out(110, LOOP)


# cpu.throttled


def throttled() -> EventBuilder:
    return on_cpu_with_a_wait({"flags": 6}, {"throttled_ms": 40})


def test_throttled_names_the_nearest_cgroup_with_a_quota() -> None:
    b = throttled().known(CgroupFact("/svc", 50_000, 100_000), CgroupFact("/svc/web", 0, 100_000))
    found, _ = b.classify(request(0, 100))
    assert ms_of(found) == {"cpu.throttled": 40, "work.cpu": 50, "work.sched": 10}
    culprit = found.culprits["cpu.throttled"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("cgroup", "/svc", SERVER)
    assert "50000 µs every 100000 µs" in culprit.detail


def test_throttled_without_a_known_quota_still_names_the_cgroup() -> None:
    found, _ = throttled().classify(request(0, 100))
    assert found.culprits["cpu.throttled"].name == "/svc/web"


def test_a_hog_beside_a_throttled_server_is_a_decoy() -> None:
    b = throttled()
    b.out(1, WORKER, 0, next_tid=HOG, cpu=1).into(99, WORKER, HOG, cpu=1)
    found, ctx = b.classify(request(0, 100))
    assert "cpu.runqueue" not in found.causes
    checks = {r.cause: r.check for r in rule_out(found, ctx, "cpu.throttled")}
    assert "cpu.throttled" not in checks
    assert "behind other processes 0.0 ms" in checks["cpu.runqueue"]


# cpu.runqueue


def hogged() -> EventBuilder:
    return on_cpu_with_a_wait({"next_tid": HOG}, {"prev_tid": HOG})


def test_run_queue_delay_names_the_process_that_had_the_cpu() -> None:
    found, ctx = hogged().classify(request(0, 100))
    assert ms_of(found) == {"cpu.runqueue": 50, "work.cpu": 50}
    culprit = found.culprits["cpu.runqueue"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "hog", HOG)
    checks = {r.cause: r.check for r in rule_out(found, ctx, "cpu.runqueue")}
    assert checks["cpu.throttled"].startswith("throttled time on the path 0.0 ms")


def test_a_slow_wake_up_behind_another_process_counts_too() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, nr=EPOLL_WAIT).wake(20, LOOP, context=2, vec=NET_RX)
    b.into(50, LOOP, HOG).recv(55, LOOP).out(80, LOOP)
    found, _ = b.classify(request(0, 60))
    assert ms_of(found) == {"cpu.runqueue": 30, "work.cpu": 20, "work.peer": 10}


def test_who_had_the_cpu_longest_is_named_not_who_had_it_last() -> None:
    b = on_cpu_with_a_wait({"next_tid": HOG}, {"prev_tid": WORKER})
    b.into(55, WORKER, HOG).out(60, WORKER, next_tid=LOOP)
    found, _ = b.classify(request(0, 100))
    assert found.culprits["cpu.runqueue"].tgid == HOG


def test_short_waits_for_a_cpu_are_ordinary() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=HOG).into(10.9, LOOP, HOG).out(60, LOOP)
    found, _ = b.classify(request(0, 50))
    assert ms_of(found) == {"work.cpu": 49.1, "work.sched": 0.9}


def test_a_hog_that_never_had_the_loops_cpu_is_not_claimed() -> None:
    b = EventBuilder().into(-5, LOOP).out(60, LOOP)
    b.into(-5, WORKER, cpu=1).out(1, WORKER, 0, next_tid=HOG, cpu=1).into(49, WORKER, HOG, cpu=1)
    found, ctx = b.classify(request(0, 49))
    assert ms_of(found) == {"work.cpu": 49}
    assert {r.cause for r in rule_out(found, ctx)} == {r.id for r in rules()}


def test_an_idle_cpu_is_nobodys_fault() -> None:
    found, _ = on_cpu_with_a_wait({"next_tid": 0}, {"prev_tid": 0}).classify(request(0, 100))
    assert ms_of(found) == {"work.cpu": 50, "work.sched": 50}


# cpu.oversubscribed


def crowd(threads: int) -> EventBuilder:
    """Siblings on CPU 0 while LOOP waits 10-60: the first runs, the others wait too. Two CPUs are allowed."""
    b = on_cpu_with_a_wait({"next_tid": 110}, {"prev_tid": 110})
    for tid in range(110, 110 + threads):
        b.tgids[tid] = SERVER
        b.into(-9, tid)
        if tid > 110:
            b.out(5, tid, 0, next_tid=110).into(90, tid, 110)
        b.out(105, tid)
    return b


def test_siblings_on_too_few_cpus_are_oversubscription() -> None:
    found, _ = crowd(4).classify(request(0, 100))
    assert found.causes["cpu.oversubscribed"] == 50
    assert found.culprits["cpu.oversubscribed"].name == "svc"
    assert "cpu.runqueue" not in found.causes


def test_two_threads_taking_turns_are_not_oversubscription() -> None:
    found, ctx = crowd(1).classify(request(0, 100))
    assert ms_of(found) == {"work.cpu": 50, "work.sched": 50}
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["cpu.oversubscribed"] == (
        "waits behind own threads 50.0 ms, at most 2.0 of them ready; 2 CPUs allowed"
    )


def test_a_gil_hand_over_is_the_holders_work() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).out(10, LOOP)
    b.wake(40, LOOP, WORKER).into(40.1, LOOP).out(41, WORKER, cpu=1).out(60, LOOP)
    found, _ = b.classify(request(0, 50))
    assert set(found.causes) == {"work.cpu", "work.sched"}


def test_other_processes_of_the_service_are_siblings() -> None:
    b = hogged().known(ProcessFact(HOG, "engine", service="svc"))
    found, _ = b.classify(request(0, 100))
    assert "cpu.runqueue" not in found.causes


# python.loop_blocked


def blocked_loop(busy_ms: float) -> EventBuilder:
    """The loop wakes at 20 and works for *busy_ms* before it reads what the worker wrote at 22."""
    end = 20 + busy_ms
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).recv(0, LOOP).out(5, LOOP, nr=EPOLL_WAIT)
    b.wake(19, LOOP, context=2, vec=NET_RX).into(20, LOOP).edge("edge_write", 22, WORKER).out(23, WORKER)
    b.edge("edge_read", end, LOOP).send(end + 5, LOOP).out(end + 10, LOOP, nr=EPOLL_WAIT)
    return b.wake(end + 20, LOOP, context=1).into(end + 20, LOOP)


def test_a_loop_kept_busy_while_the_answer_lay_ready() -> None:
    found, _ = blocked_loop(100).classify(request(0, 125))
    assert ms_of(found) == {"python.loop_blocked": 98, "work.cpu": 27}
    culprit = found.culprits["python.loop_blocked"]
    assert (culprit.kind, culprit.name, culprit.tid) == ("thread", "loop", LOOP)


def test_a_go_under_50_ms_is_an_event_loops_work() -> None:
    found, _ = blocked_loop(49).classify(request(0, 74))
    assert "python.loop_blocked" not in found.causes


def test_a_busy_loop_that_serves_sockets_is_not_blocked() -> None:
    b = blocked_loop(100)
    for t in range(25, 120, 30):
        b.recv(t, LOOP, key=COOKIE + 1)
    found, ctx = b.classify(request(0, 125))
    assert "python.loop_blocked" not in found.causes
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["python.loop_blocked"] == "no go of 50 ms or more on an event-loop thread of the path"


def test_a_busy_worker_is_not_a_loop() -> None:
    b = EventBuilder().into(-5, LOOP).out(0.5, LOOP, nr=EPOLL_WAIT).into(-5, WORKER, cpu=1)
    b.wake(100, LOOP, WORKER).into(100, LOOP).out(110, WORKER).out(110, LOOP, nr=EPOLL_WAIT)
    found, ctx = b.classify(request(0, 101))
    assert ms_of(found) == {"work.cpu": 101}
    assert not ctx.goes(WORKER)


def test_sleeping_on_the_loop_blocks_it() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(5, LOOP, nr=NANOSLEEP).wake(90, LOOP, context=1)
    b.into(90, LOOP).send(95, LOOP).out(96, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 95))
    assert ms_of(found) == {"python.loop_blocked": 95}
    assert any("clock_nanosleep" in s.detail for s in found.segments)


def test_resting_in_epoll_is_not_a_go() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(5, LOOP, nr=EPOLL_WAIT).wake(90, LOOP, context=1)
    b.into(90, LOOP).send(95, LOOP).out(96, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 95))
    assert ms_of(found) == {"work.cpu": 10, "work.timer": 85}


def test_throttling_inside_a_go_keeps_its_own_cause() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(40, LOOP, 0, flags=6).into(60, LOOP, throttled_ms=20)
    b.send(100, LOOP).out(101, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found) == {"cpu.throttled": 20, "python.loop_blocked": 80}


def test_waiting_for_a_cpu_does_not_make_a_go_long() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(10, LOOP, 0, next_tid=HOG).into(60, LOOP, HOG)
    b.send(80, LOOP).out(81, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 80))
    assert ms_of(found) == {"cpu.runqueue": 50, "work.cpu": 30}


def test_time_to_first_byte_is_summed_apart() -> None:
    found, _ = hogged().classify(request(0, 100, first_ms=30))
    assert found.ttft_causes == {"cpu.runqueue": 20, "work.cpu": 10}


# the package


def test_every_rule_is_found_and_complete() -> None:
    ids = [r.id for r in rules()]
    assert set(ids) == {
        "client.artifact",
        "client.retry_storm",
        "client.self_queued",
        "cpu.numa",
        "cpu.oversubscribed",
        "cpu.power",
        "cpu.runqueue",
        "cpu.throttled",
        "engine.batch_timer",
        "engine.costly_neighbour",
        "engine.cpu_bound_step",
        "engine.frozen",
        "engine.ipc_copy",
        "engine.ipc_spin",
        "engine.jit_compile",
        "engine.kv_preemption",
        "engine.kv_transfer",
        "engine.model_changed",
        "engine.prefill_interference",
        "engine.prefix_miss",
        "engine.queueing",
        "engine.recompile",
        "engine.reload",
        "engine.speculation",
        "engine.straggler",
        "engine.token_inflation",
        "engine.zombie_request",
        "io.disk_contention",
        "io.log_blocked",
        "io.writeback",
        "lock.contention",
        "lock.framework",
        "lock.malloc",
        "memory.allocator_growth",
        "memory.cgroup_limit",
        "memory.compaction",
        "memory.mmap_faults",
        "memory.oom",
        "memory.reclaim",
        "memory.swap",
        "net.accept_overflow",
        "net.connection_setup",
        "net.delivery",
        "net.dns",
        "net.loss",
        "net.nagle",
        "net.transport",
        "observer.metric_lock",
        "observer.scrape",
        "observer.tracer",
        "python.fd_exhausted",
        "python.frontend_saturated",
        "python.gc",
        "python.gil",
        "python.loop_blocked",
        "python.pool_exhausted",
    }
    assert len({r.rank for r in rules()}) == len(ids)
    for rule in rules():
        assert isinstance(rule, Rule)
        assert rule.title
        assert rule.fix.startswith("Try ")
        assert rule.id not in rule.neighbours


def test_evidence_says_how_much_and_where() -> None:
    found, _ = hogged().classify(request(0, 100))
    first, detail = found.evidence["cpu.runqueue"]
    assert first == "50.0 ms in 1 segment of the critical path, the longest 50.0 ms on thread loop (100)"
    assert detail == f"CPU used by hog ({HOG})"


@settings(max_examples=150, deadline=None)
@given(lossy_events(), st.integers(-5, 60), st.integers(0, 100))
def test_classified_segments_tile_whatever_was_lost(b: EventBuilder, start: int, length: int) -> None:
    wanted = request(start, start + length)
    path, timelines = b.walk(wanted)
    ctx = Context(timelines, wanted)
    found = classify(path, ctx)
    at = wanted.start_ns
    for s in found.segments:
        assert s.start_ns == at
        assert s.end_ns > at
        at = s.end_ns
    assert at == wanted.end_ns
    assert sum(found.causes.values()) == pytest.approx(length)
    assert len(rule_out(found, ctx)) == len(rules())


def test_rules_are_asked_in_one_order_whatever_their_files_are_called() -> None:
    # What a wait was for outranks where it happened: quota, log, CPU, disk, loop; then what the engine says, from
    # what is certain (it compiled) to what is left over (it queued, the core was at work).
    assert [r.id for r in rules()] == [
        "memory.oom",
        "observer.tracer",
        "cpu.throttled",
        "python.gc",
        "memory.compaction",
        "memory.cgroup_limit",
        "memory.swap",
        "memory.reclaim",
        "memory.mmap_faults",
        "cpu.numa",
        "memory.allocator_growth",
        "io.log_blocked",
        "client.retry_storm",
        "python.gil",
        "lock.malloc",
        "lock.framework",
        "observer.metric_lock",
        "lock.contention",
        "engine.ipc_spin",
        "cpu.power",
        "cpu.runqueue",
        "cpu.oversubscribed",
        "net.dns",
        "net.connection_setup",
        "net.nagle",
        "net.loss",
        "net.transport",
        "net.accept_overflow",
        "python.fd_exhausted",
        "io.writeback",
        "io.disk_contention",
        "client.artifact",
        "client.self_queued",
        "net.delivery",
        "python.pool_exhausted",
        "observer.scrape",
        "python.loop_blocked",
        "python.frontend_saturated",
        "engine.recompile",
        "engine.jit_compile",
        "engine.reload",
        "engine.frozen",
        "engine.zombie_request",
        "engine.kv_transfer",
        "engine.kv_preemption",
        "engine.batch_timer",
        "engine.prefill_interference",
        "engine.costly_neighbour",
        "engine.ipc_copy",
        "engine.token_inflation",
        "engine.prefix_miss",
        "engine.straggler",
        "engine.speculation",
        "engine.queueing",
        "engine.cpu_bound_step",
        "engine.model_changed",
    ]


def test_the_culprit_is_the_one_with_most_time_not_the_first() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=901).into(20, LOOP, 901)
    b.out(30, LOOP, 0, next_tid=HOG).into(60, LOOP, HOG).out(110, LOOP)
    found, _ = b.classify(request(0, 100))
    assert found.causes["cpu.runqueue"] == 40
    assert found.culprits["cpu.runqueue"].tgid == HOG
    assert found.evidence["cpu.runqueue"][-1] == "by culprit: hog 30.0 ms, process 901 10.0 ms"


def test_unknown_cpus_claim_no_oversubscription() -> None:
    b = crowd(6).known(ProcessFact(SERVER, "server", service="svc"))
    found, ctx = b.classify(request(0, 100))
    assert "cpu.oversubscribed" not in found.causes
    assert "allowed CPUs not known" in {r.cause: r.check for r in rule_out(found, ctx)}["cpu.oversubscribed"]
