"""Waits for locks: told from hand-overs, replaced by what the holder did, and claimed by the right rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.causes import rule_out
from whyspan.critical_path import Path
from whyspan.locks import GIL, MALLOC, MMAP_LOCK, MUTEX, Locks
from whyspan.model import LockFact, TextRange
from whyspan.timeline import BLOCKED, RUNNING, WAKEUP

from tests.unit.lossy import GIL_START
from tests.unit.timeline import (
    EPOLL_WAIT,
    HOG,
    LOOP,
    NANOSLEEP,
    SERVER,
    WORKER,
    D,
    EventBuilder,
    ms_of,
    ns,
    request,
    shape,
)

COND, SWITCH_COND = GIL_START + 32, GIL_START + 120
ARENA, HEAP_ARENA, USER = 0xA000, (7 << 26) + 0x30, 0xBEEF00
LIBC, LIBGOMP, LIBTORCH, PROMETHEUS, HELPER = 0x100000, 0x200000, 0x300000, 0x400000, 0x500000
BITSET, TIMED = 9, 0x100
SIBLING = 103
LOCKS = ("python.gil", "lock.malloc", "lock.framework", "observer.metric_lock", "lock.contention")


def builder() -> EventBuilder:
    """A Python server with libc, libgomp, torch, a metrics library and one of nobody known."""
    b = EventBuilder()
    b.tgids[SIBLING] = SERVER
    paths = {
        LIBC: "/usr/lib/x86_64-linux-gnu/libc.so.6",
        LIBGOMP: "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0",
        LIBTORCH: "/v/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so",
        PROMETHEUS: "/usr/lib/libprometheus-cpp-core.so.1",
        HELPER: "/srv/helper.so",
    }
    text = [TextRange(at, at + 0x1000, path) for at, path in paths.items()]
    return b.known(LockFact(SERVER, GIL_START, GIL_START + 208, ARENA, text))


def gil_wait(b: EventBuilder, start: float, end: float, tid: int = LOOP, by: int = WORKER) -> EventBuilder:
    """The thread waits for the interpreter lock as take_gil does: 5 ms at a time, woken by the last holder."""
    t = start
    while t + 5 < end:
        b.locked(t, tid, COND, op=BITSET | TIMED, val=0)
        b.wake(t + 5, tid, HOG, context=1).into(t + 5.01, tid)
        t += 5.02
    b.locked(t, tid, COND, op=BITSET | TIMED, val=0)
    return b.wake(end, tid, by).into(end + 0.05, tid)


def hogged() -> EventBuilder:
    """LOOP waits for the interpreter lock 10-70, which WORKER has while it computes."""
    b = gil_wait(builder().into(-5, LOOP).into(-5, WORKER, cpu=1), 10, 70)
    b.out(75, WORKER, nr=NANOSLEEP, cpu=1)
    return b.out(95, LOOP, nr=EPOLL_WAIT)


def test_the_holders_time_replaces_the_wait_and_nothing_else() -> None:
    path, _ = hogged().walk(request(0, 90))
    assert shape(path) == [
        (0, 10, LOOP, RUNNING),
        (10, 70, WORKER, RUNNING),
        (70, 70.05, LOOP, WAKEUP),
        (70.05, 90, LOOP, RUNNING),
    ]
    (via,) = {s.via for s in path.segments if s.via is not None}
    assert (via.tid, via.kind, via.start_ns, via.end_ns) == (LOOP, GIL, ns(10), ns(70))


def test_a_sibling_that_keeps_the_interpreter_lock_is_named() -> None:
    found, ctx = hogged().classify(request(0, 90))
    assert ms_of(found) == {"python.gil": 60, "work.cpu": 29.95, "work.sched": 0.05}
    culprit = found.culprits["python.gil"]
    assert (culprit.kind, culprit.tid, culprit.name) == ("thread", WORKER, "worker")
    assert any("in native code" in line for line in found.evidence["python.gil"])
    checks = {r.cause: r.check for r in rule_out(found, ctx, "python.gil")}
    assert checks["lock.contention"].endswith("all waits for locks on the path 60.0 ms")
    assert "python.loop_blocked" not in found.causes


def test_a_usual_wait_for_the_interpreter_lock_is_none() -> None:
    b = gil_wait(builder().into(-5, LOOP).into(-5, WORKER, cpu=1), 10, 13)
    found, ctx = b.out(15, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT).classify(request(0, 50))
    assert not set(LOCKS) & set(found.causes)
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["python.gil"].startswith("no wait for an interpreter lock of 4 ms or more")


def test_a_convoy_of_python_threads() -> None:
    # WORKER and SIBLING compute in turns of 5 ms; LOOP gets the lock after both.
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(-4, SIBLING, COND, op=BITSET | TIMED, val=0, cpu=1)
    gil_wait(b, 10, 20, LOOP, SIBLING)
    b.wake(15, SIBLING, WORKER).locked(15.001, WORKER, SWITCH_COND, op=BITSET, val=0, cpu=1)
    b.into(15.002, SIBLING, cpu=1).wake(15.003, WORKER, SIBLING)
    b.out(25, SIBLING, nr=EPOLL_WAIT, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    held = [(s.tid, s.state) for s in path.segments if s.via is not None]
    assert held == [(WORKER, RUNNING), (SIBLING, WAKEUP), (SIBLING, RUNNING)]
    assert {s.via.tid for s in path.segments if s.via is not None} == {LOOP}
    found, _ = b.classify(request(0, 50))
    assert ms_of(found)["python.gil"] == 10


def test_woken_by_its_own_timer_the_busy_sibling_is_inferred() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    for t in (10, 15.02, 20.04):
        b.locked(t, LOOP, COND, op=BITSET | TIMED, val=0).wake(t + 5, LOOP, HOG, context=1).into(
            t + 5.01, LOOP
        )
    b.out(60, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    held = [s for s in path.segments if s.via is not None]
    assert [(s.tid, s.inferred) for s in held] == [(WORKER, True)]
    assert held[0].ns == pytest.approx(15.04e6)


def test_a_sibling_that_only_asks_again_is_not_the_holder() -> None:
    # WORKER was preempted by SIBLING, whose own 5 ms are up at the same moment.
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(10, LOOP, COND, op=BITSET | TIMED, val=0).locked(9.99, SIBLING, COND, op=BITSET | TIMED, val=0)
    b.wake(14.95, SIBLING, HOG, context=1).out(14.96, WORKER, 0, next_tid=SIBLING, cpu=1)
    b.into(14.96, SIBLING, WORKER, cpu=1).wake(15, LOOP, HOG, context=1).into(15.01, LOOP)
    b.locked(15.02, SIBLING, COND, op=BITSET | TIMED, val=0, cpu=1).into(15.03, WORKER, cpu=1)
    b.out(60, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    held = [s for s in b.walk(request(0, 50))[0].segments if s.via is not None]
    assert {s.tid for s in held} == {WORKER}


def contended(address: int, *, ip: int = LIBC, words: tuple[int, ...] = (), **held: bool) -> EventBuilder:
    """LOOP waits 10-40 for a mutex that WORKER has, who sleeps meanwhile if ``asleep``; SIBLING waits, too."""
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(9, SIBLING, address, ip=ip, words=words)
    if held.get("asleep"):
        b.out(5, WORKER, nr=NANOSLEEP, cpu=1).wake(39, WORKER, context=1).into(39.01, WORKER, cpu=1)
    b.locked(10, LOOP, address, ip=ip, words=words).wake(40, LOOP, WORKER).into(40.05, LOOP)
    return b.out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)


@pytest.mark.parametrize(
    ("address", "words", "cause"),
    [
        (USER, (), "lock.contention"),
        (USER, (HELPER + 8,), "lock.contention"),
        (USER, (0x7F0000, LIBTORCH + 8, HELPER + 8), "lock.framework"),
        (USER, (PROMETHEUS + 8,), "observer.metric_lock"),
        (ARENA, (LIBTORCH + 8,), "lock.malloc"),
        (HEAP_ARENA, (), "lock.malloc"),
    ],
)
def test_whose_lock_it_is(address: int, words: tuple[int, ...], cause: str) -> None:
    found, ctx = contended(address, words=words).classify(request(0, 50))
    assert ms_of(found)[cause] == 30
    assert found.culprits[cause].tid == WORKER
    assert set(found.causes) & set(LOCKS) == {cause}
    checks = {r.cause: r.check for r in rule_out(found, ctx, cause)}
    assert all("all waits for locks on the path 30.0 ms" in checks[c] for c in LOCKS if c != cause)


def test_a_holder_that_sleeps_is_still_the_holder() -> None:
    path, _ = contended(USER, asleep=True).walk(request(0, 50))
    held = [s for s in path.segments if s.via is not None]
    assert [(s.tid, s.state) for s in held] == [(WORKER, BLOCKED), (WORKER, WAKEUP), (WORKER, RUNNING)]
    found, _ = contended(USER, asleep=True).classify(request(0, 50))
    assert ms_of(found)["lock.contention"] == 30
    assert "(2 waits of 2 threads)" in found.culprits["lock.contention"].detail


def test_a_holder_without_a_cpu_is_somebody_elses_doing_and_the_wait_is_the_link() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(10, LOOP, USER, ip=LIBC).out(11, WORKER, 0, next_tid=HOG, cpu=1).into(39, WORKER, HOG, cpu=1)
    b.wake(40, LOOP, WORKER).into(40.05, LOOP).out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 50))
    assert ms_of(found)["cpu.runqueue"] == 28
    assert ms_of(found)["lock.contention"] == 2
    assert found.culprits["cpu.runqueue"].tgid == HOG
    link = "while loop (100) waited for a mutex of libc.so.6"
    assert any(link in line for line in found.evidence["cpu.runqueue"])


def test_a_hand_over_is_followed_beyond_its_start_and_is_no_contention() -> None:
    # A condition variable, a semaphore: the worker is woken for the request, and wakes the loop with the result.
    b = builder().into(-20, LOOP).locked(-25, WORKER, USER, op=BITSET, val=0, cpu=1)
    b.wake(1, WORKER, LOOP).into(2, WORKER, cpu=1).locked(3, LOOP, USER + 64, op=BITSET, val=0)
    b.wake(40, LOOP, WORKER).into(40.1, LOOP).locked(41, WORKER, USER, op=BITSET, val=0, cpu=1)
    b.out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    assert shape(path)[:3] == [(0, 1, LOOP, RUNNING), (1, 2, WORKER, WAKEUP), (2, 40, WORKER, RUNNING)]
    assert all(s.via is None for s in path.segments)
    found, ctx = b.classify(request(0, 50))
    assert not set(LOCKS) & set(found.causes)
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["lock.contention"].endswith("waits for locks on the path 0.0 ms")


def test_idle_workers_at_one_queue_are_no_contention() -> None:
    b = builder().into(-20, LOOP)
    for k, tid in enumerate(range(110, 140)):
        b.tgids[tid] = SERVER
        b.locked(-30 + k / 10, tid, USER, op=BITSET, val=0, cpu=1)
    b.wake(1, 110, LOOP).into(2, 110, cpu=1).out(3, LOOP, nr=EPOLL_WAIT)
    b.edge("edge_write", 30, 110).wake(30.01, LOOP, 110, nr=1).into(30.1, LOOP).edge("edge_read", 30.2, LOOP)
    b.locked(31, 110, USER, op=BITSET, val=0, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 50))
    assert not set(LOCKS) & set(found.causes)


def test_waits_inside_openmp_are_no_locks() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(10, LOOP, USER, ip=LIBGOMP + 4).wake(40, LOOP, WORKER).into(40.1, LOOP)
    b.out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    path, timelines = b.walk(request(0, 50))
    assert all(s.via is None for s in path.segments)
    thread = timelines.thread(LOOP)
    at = thread.before(ns(20)).at
    assert timelines.shared(Locks).openmp(LOOP, SERVER, thread.wait(at))


def test_the_lock_of_the_memory_map_is_the_kernels() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.add("mmap_lock_wait", 10, LOOP, aux=1, owner_tid=WORKER, owner_tgid=SERVER, key=5)
    b.out(10.001, LOOP, D, nr=-1).wake(40, LOOP, WORKER).into(40.1, LOOP)
    b.out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    assert {s.via.kind for s in path.segments if s.via is not None} == {MMAP_LOCK}
    found, _ = b.classify(request(0, 50))
    assert ms_of(found)["lock.contention"] == pytest.approx(29.999)
    assert "mmap_lock" in found.culprits["lock.contention"].detail


def test_a_thread_woken_in_vain_still_waits_for_the_memory_map() -> None:
    # Another one took the lock before it: it sleeps again, and contention does not begin again.
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1).into(-5, SIBLING, cpu=2)
    b.add("mmap_lock_wait", 10, LOOP, aux=2, owner_tid=WORKER, owner_tgid=SERVER, key=5)
    b.out(10.001, LOOP, D, nr=9).wake(20, LOOP, WORKER).into(20.01, LOOP)
    b.out(20.02, LOOP, D, nr=9).wake(40, LOOP, SIBLING).into(40.1, LOOP)
    b.out(41, WORKER, cpu=1).out(42, SIBLING, cpu=2).out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    assert [(s.tid, s.ns) for s in path.segments if s.via is not None] == [
        (WORKER, 9_999_000),
        (SIBLING, 19_980_000),
    ]


def test_a_thread_preempted_before_it_sleeps_waits_for_the_memory_map() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.add("mmap_lock_wait", 10, LOOP, aux=2, owner_tid=WORKER, owner_tgid=SERVER, key=5)
    b.out(10.001, LOOP, 0, nr=-2).into(13, LOOP).out(13.01, LOOP, D, nr=9)
    b.wake(40, LOOP, WORKER).into(40.1, LOOP).out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    assert [(s.tid, s.ns) for s in path.segments if s.via is not None] == [(WORKER, 26_990_000)]


def test_a_disk_wait_behind_one_for_the_memory_map_is_the_disks() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.add("mmap_lock_wait", 10, LOOP, aux=1, owner_tid=WORKER, owner_tgid=SERVER, key=5)
    b.out(10.001, LOOP, D, nr=-1).wake(20, LOOP, WORKER).into(20.01, LOOP)
    b.out(20.02, LOOP, D, nr=-1).wake(40, LOOP, 0, context=3).into(40.1, LOOP)
    b.out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    assert [(s.tid, s.ns) for s in path.segments if s.via is not None] == [(WORKER, 9_999_000)]


def test_a_later_sleep_is_not_the_memory_maps() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.add("mmap_lock_wait", 10, LOOP, aux=1, owner_tid=WORKER, owner_tgid=SERVER, key=5)
    b.out(20, LOOP, D, nr=0).wake(40, LOOP, WORKER).into(40.1, LOOP)
    b.out(41, WORKER, cpu=1).out(60, LOOP, nr=EPOLL_WAIT)
    assert all(s.via is None for s in b.walk(request(0, 50))[0].segments)


def test_a_lock_within_a_lock_is_the_inner_ones_doing() -> None:
    # WORKER has the interpreter lock and waits for a mutex that SIBLING has.
    b = gil_wait(builder().into(-5, LOOP).into(-5, WORKER, cpu=1).into(-5, SIBLING, cpu=1), 10, 70)
    b.locked(20, WORKER, USER, ip=LIBC, cpu=1).wake(60, WORKER, SIBLING).into(60.01, WORKER, cpu=1)
    b.out(75, WORKER, cpu=1).out(61, SIBLING, cpu=1).out(110, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 100))
    inner = next(s for s in path.segments if s.tid == SIBLING)
    assert inner.via is not None
    assert (inner.via.kind, inner.via.tid, inner.ns) == (MUTEX, WORKER, 40_000_000)
    assert inner.via.outer is not None
    assert (inner.via.outer.kind, inner.via.outer.tid) == (GIL, LOOP)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found)["python.gil"] == pytest.approx(20)
    assert ms_of(found)["lock.contention"] == pytest.approx(40)


def test_a_mutex_that_is_never_let_go_is_its_owners() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(10, LOOP, USER, ip=LIBC, owner=WORKER).out(60, WORKER, cpu=1)
    path, _ = b.walk(request(0, 50, outcome="open", status=0))
    assert shape(path) == [(0, 10, LOOP, RUNNING), (10, 50, WORKER, RUNNING)]
    assert path.segments[-1].inferred


def test_without_facts_a_mutex_is_still_a_mutex() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    b.locked(10, LOOP, ARENA).wake(40, LOOP, WORKER).into(40.1, LOOP).out(41, WORKER, cpu=1)
    path, _ = b.out(60, LOOP).walk(request(0, 50))
    assert {s.via.kind for s in path.segments if s.via is not None} == {MUTEX}


def test_many_short_waits_for_the_allocator_count_together() -> None:
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    for k in range(17):
        t = 10 + k
        b.locked(t, LOOP, ARENA, ip=LIBC).wake(t + 0.5, LOOP, WORKER).into(t + 0.51, LOOP)
    found, _ = b.out(60, WORKER, cpu=1).out(60, LOOP).classify(request(0, 50))
    assert ms_of(found)["lock.malloc"] == pytest.approx(8.5)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.booleans()), min_size=1, max_size=25))
def test_paths_with_locks_tile_and_stay_within_their_waits(steps: list[tuple[int, int, bool]]) -> None:
    # Three threads pass a mutex on, in any order, some of them asleep while they have it.
    b = builder()
    tids = (LOOP, WORKER, SIBLING)
    for cpu, tid in enumerate(tids):
        b.into(-5, tid, cpu=cpu)
    t = 1.0
    for who, length, asleep in steps:
        waiter, holder = tids[who], tids[(who + 1) % 3]
        b.locked(t, waiter, USER, ip=LIBC, cpu=who)
        if asleep:
            b.out(t + 0.1, holder, nr=NANOSLEEP).wake(t + length - 0.2, holder, context=1)
            b.into(t + length - 0.1, holder)
        b.wake(t + length, waiter, holder).into(t + length + 0.01, waiter, cpu=who)
        t += length + 1
    for cpu, tid in enumerate(tids):
        b.out(t + 5, tid, cpu=cpu)
    path: Path = b.walk(request(0, t))[0]
    assert sum(s.ns for s in path.segments) == path.end_ns - path.start_ns
    for s in path.segments:
        if s.via is not None:
            assert s.via.start_ns <= s.start_ns < s.end_ns <= s.via.end_ns
    assert {s.via.kind for s in path.segments if s.via is not None} <= {MUTEX, MALLOC}


def test_who_waited_for_the_lock_too_did_not_have_it_before() -> None:
    # WORKER slept at a poll, woke, waited for the lock that SIBLING had all along, and gave it on to LOOP.
    b = builder().into(-5, LOOP).into(-5, WORKER, cpu=1).into(-5, SIBLING, cpu=1)
    b.out(-4, WORKER, nr=EPOLL_WAIT, cpu=1).wake(40, WORKER, HOG, context=1).into(40.01, WORKER, cpu=1)
    b.locked(41, WORKER, USER, ip=LIBC, cpu=1).wake(55, WORKER, SIBLING).into(55.01, WORKER, cpu=1)
    b.locked(10, LOOP, USER, ip=LIBC).wake(60, LOOP, WORKER).into(60.01, LOOP)
    b.out(61, SIBLING, cpu=1).out(62, WORKER, cpu=1).out(110, LOOP, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 100))
    held = [s for s in path.segments if s.via is not None]
    assert {s.tid: sum(o.ns for o in held if o.tid == s.tid) for s in held} == {
        SIBLING: 45_000_000,
        WORKER: 5_000_000,
    }
    assert {s.via.tid for s in held if s.via is not None} == {LOOP}
