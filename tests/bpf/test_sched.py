"""sched: counted switches, wake-ups and lives of a child's threads."""

from __future__ import annotations

import signal

import pytest

from tests.bpf.conftest import Spawn, Watch

pytestmark = pytest.mark.bpf

NR_NANOSLEEP, NR_FUTEX = 230, 202  # clock_nanosleep: what time.sleep uses
BLOCKED, STOPPED = 0x3, 0xC
PREEMPTED, CALL_VALID = 1, 4
HRTIMER, TASK = 1, 0
#: Some virtual machines hide what happens on a CPU while a thread of their own has it, from every tracer: about one
#: event in 5,000. What our own threads do while they run is never hidden.
HIDDEN = 1


def test_sleeps_are_blocks_in_nanosleep_ended_by_timers(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("sleeps", 23)
    w.watch(child.tgid)
    child.run()
    outs = w.rows("sched_switch_out", tid=child.tgid, syscall_nr=NR_NANOSLEEP)
    assert len(outs) == 23
    assert (outs["aux"] & BLOCKED == 1).all()
    assert (outs["flags"] & CALL_VALID != 0).all()
    wakes = w.rows("sched_wake", tid=child.tgid, aux=HRTIMER)["ts_ns"]
    ins = w.rows("sched_switch_in", tid=child.tgid)["ts_ns"]
    ends = [*outs["ts_ns"][1:], 2**63]
    ended = [(wakes > out) & (wakes < end) for out, end in zip(outs["ts_ns"], ends, strict=True)]
    resumed = [(ins > out) & (ins < end) for out, end in zip(outs["ts_ns"], ends, strict=True)]
    # Each block is ended by its own timer, 2 ms later, and followed by its own switch-in.
    assert sum(int(e.sum()) == 1 for e in ended) >= 23 - HIDDEN
    assert sum(bool(r.any()) for r in resumed) >= 23 - HIDDEN
    assert len(wakes) <= 23
    delays_ns = [int(wakes[e][0] - out) for e, out in zip(ended, outs["ts_ns"], strict=True) if e.any()]
    assert min(delays_ns) > 1_000_000


def test_the_waker_of_a_futex_is_named(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("futex", 17)
    w.watch(child.tgid)
    child.run()
    waiter, waker = child.facts["waiter"], child.facts["waker"]
    outs = w.rows("sched_switch_out", tid=waiter, syscall_nr=NR_FUTEX)
    outs = outs[outs["arg0"] == child.facts["address"]]
    assert len(outs) == 17
    wakes = w.rows("sched_wake", tid=waiter)
    for out in outs:
        (wake,) = wakes[wakes["ts_ns"] > out["ts_ns"]][:1]
        assert (wake["waker_tid"], wake["waker_tgid"]) == (waker, child.tgid)
        assert (wake["aux"], wake["waker_nr"]) == (TASK, NR_FUTEX)


def test_a_pinned_hog_is_named_as_who_ran_instead(watch: Watch, spawn: Spawn) -> None:
    w = watch("sched")
    hog, child = spawn("burn", 30, 1, "hog-under-test", cpu=1), spawn("burn", 0.5, cpu=1)
    hog.say()
    w.watch(child.tgid)
    child.run()
    outs = w.rows("sched_switch_out", tid=child.tgid, next_tid=hog.tgid)
    runnable = outs[outs["aux"] == 0]
    assert len(runnable) >= 3
    assert (runnable["syscall_nr"] == -2).all()
    assert (runnable["next_tgid"] == hog.tgid).all()
    assert w.count("sched_switch_in", tid=child.tgid, prev_tid=hog.tgid) >= 3
    (name,) = w.rows("sched_name", tid=hog.tgid)  # named once, however often it ran
    assert name["comm"] == b"hog-under-test"


def test_page_faults_are_no_system_call(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("faults", 37)
    if "error" in child.facts:
        pytest.skip(f"userfaultfd: {child.facts['error']}")
    w.watch(child.tgid)
    child.run()
    outs = w.rows("sched_switch_out", tid=child.tgid, syscall_nr=-1)
    outs = outs[outs["aux"] & BLOCKED != 0]
    assert len(outs) == 37
    assert (outs["flags"] & CALL_VALID != 0).all()
    assert (outs["arg0"] == 0).all()
    wakes = w.rows("sched_wake", tid=child.tgid, waker_tid=child.facts["provider"])
    assert all((wakes["ts_ns"] > out["ts_ns"]).any() for out in outs)


def test_a_stopped_task_is_in_no_system_call(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("sleeps", 3, 300)
    w.watch(child.tgid)
    child.say()
    w.wait(lambda: w.count("sched_switch_out", tid=child.tgid, syscall_nr=NR_NANOSLEEP), "it sleeps")
    child.signal(signal.SIGSTOP)

    def stopped() -> bool:
        return bool((w.rows("sched_switch_out", tid=child.tgid)["aux"] & STOPPED).any())

    w.wait(stopped, "it is stopped")
    child.signal(signal.SIGCONT)
    child.answer()
    outs = w.rows("sched_switch_out", tid=child.tgid)
    outs = outs[outs["aux"] & STOPPED != 0]
    assert (outs["syscall_nr"] == -2).all()
    assert (outs["flags"] & CALL_VALID == 0).all()
    assert (outs["arg0"] == 0).all()


def test_children_are_followed_through_fork_exec_and_exit(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("programs", 11, 7)
    w.watch(child.tgid)
    pids = child.run()["pids"]
    forks = w.rows("sched_fork", tgid=child.tgid)
    assert forks["child_tgid"].tolist() == pids == forks["child_tid"].tolist()
    for pid in pids:
        (program,) = w.rows("sched_exec", tgid=pid)
        assert program["comm"] == b"sh"
        (gone,) = w.rows("sched_exit", tgid=pid)
        assert (gone["aux"], gone["exit_code"], gone["comm"]) == (1, 7 << 8, b"sh")
    assert sum(w.count("sched_switch_in", tgid=pid) > 0 for pid in pids) >= len(pids) - HIDDEN
    assert w.session.maps.watched() == {child.tgid}


def test_a_process_of_32_threads_and_its_end(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("threads_then_exit", 31)
    w.watch(child.tgid)
    tids = {*child.run()["tids"], child.tgid}
    forks = w.rows("sched_fork", tgid=child.tgid)
    assert {*forks["child_tid"].tolist(), child.tgid} == tids
    assert len(tids) == 32
    assert (forks["child_tgid"] == child.tgid).all()
    w.wait(
        lambda: set(w.rows("sched_switch_out", tgid=child.tgid)["tid"].tolist()) == tids,
        "every thread is seen going to sleep",
    )
    assert len(tids - set(w.rows("sched_switch_in", tgid=child.tgid)["tid"].tolist())) <= HIDDEN
    child.end()
    w.wait(lambda: w.count("sched_exit", tgid=child.tgid) >= 32, "the process is gone")
    exits = w.rows("sched_exit", tgid=child.tgid)
    assert sorted(exits["tid"].tolist()) == sorted(tids)
    assert sorted(exits["aux"].tolist()) == [0] * 31 + [1]
    assert w.session.maps.watched() == set()


def test_an_unwatched_process_emits_nothing(watch: Watch, spawn: Spawn) -> None:
    w = watch("sched", "edges", "fds", "sockets")
    other, child = spawn("sleeps", 29), spawn("sleeps", 5)
    third = spawn("unix_stream", 5, 3)
    w.watch(child.tgid)
    other.run()
    third.run()
    child.run()
    w.drain()
    subjects = w.events[w.events["kind"] != w.schema.kind("sched_name")]
    assert len(subjects) > 0
    assert set(subjects["tgid"].tolist()) == {child.tgid}


def test_foreign_threads_are_not_named_when_told_so(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched", config={"sched": {"names": 0}}), spawn("sleeps", 23)
    w.watch(child.tgid)
    child.run()
    assert w.count("sched_switch_out", tid=child.tgid) >= 23
    assert w.count("sched_name") == 0


def test_soft_interrupts_on_top_of_a_thread_are_counted_in_ticks(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("datagrams", 200_003)
    w.watch(child.tgid)
    child.run()
    rows = w.rows("sched_stolen")
    assert len(rows) > 0
    assert set(rows["tid"].tolist()) == {child.tgid}
    assert set(rows["aux"].tolist()) <= {2, 3, 4, 5, 6}  # none that the tick itself raises
    received = rows[rows["aux"] == 3]
    assert len(received) > 0
    assert (received["syscall_nr"] == 44).any()  # over the loopback: on the spot, in sendto
    assert (rows["stolen_ns"] >= 500_000).all()
