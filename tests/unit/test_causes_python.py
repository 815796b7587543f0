"""Rules on Python's collector, on pools and descriptors that ran out, and on compilers inside a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from whyspan.causes import rule_out
from whyspan.causes.context import Context
from whyspan.causes.python_fd_exhausted import RULE as FD_EXHAUSTED
from whyspan.critical_path import NET_RX
from whyspan.fdcounts import DescriptorCounts, descriptors_fact
from whyspan.model import DescriptorsFact, ProcessFact, Request, ThreadFact

from tests.unit.timeline import (
    COOKIE,
    EPOLL_WAIT,
    FUTEX,
    HOG,
    LOOP,
    SERVER,
    WORKER,
    EventBuilder,
    ms_of,
    ns,
    request,
)

SECOND = 102  # another worker
OTHER = 88  # another request's connection
PORT, UPSTREAM = 8000, 9000
K1, K2, K3 = 901, 902, 903
ACCEPT4, OPENAT, NANOSLEEP, WAIT4 = 288, 257, 230, 61
EMFILE = 24


def checks(found: object, ctx: Context) -> dict[str, str]:
    return {r.cause: r.check for r in rule_out(found, ctx)}  # type: ignore[arg-type]


# python.gc


def collecting(b: EventBuilder, tid: int, begin: float, end: float, aux: int = 2) -> EventBuilder:
    return b.add("gc_pause", end, tid, aux=aux, begin_ns=ns(begin), collected=7)


def on_cpu(until: float = 110) -> EventBuilder:
    """LOOP works for the request from 0 to *until*."""
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(until, LOOP)
    return b.out(until + 1, LOOP, nr=EPOLL_WAIT)


def test_a_collection_on_the_path_names_its_thread_and_generation() -> None:
    b = collecting(collecting(on_cpu(40), LOOP, 10, 35), LOOP, -90, -60)
    found, _ = b.classify(request(0, 40))
    assert ms_of(found) == {"python.gc": 25, "work.cpu": 15}
    culprit = found.culprits["python.gc"]
    assert (culprit.kind, culprit.tid, culprit.tgid) == ("thread", LOOP, SERVER)
    assert culprit.detail == "all generations, 2 long ones in the time looked at, one every 100 ms"
    assert found.evidence["python.gc"][1] == "collected all generations for 25 ms, 7 objects freed"


def test_the_rest_of_a_long_go_stays_the_loops() -> None:
    found, ctx = collecting(on_cpu(), LOOP, 20, 60).classify(request(0, 110))
    assert ms_of(found) == {"python.gc": 40, "python.loop_blocked": 70}
    found, ctx = on_cpu().classify(request(0, 110))
    assert ms_of(found) == {"python.loop_blocked": 110}
    assert checks(found, ctx)["python.gc"] == "no garbage collection of 1 ms or more on the path's threads"


def test_a_short_collection_of_the_youngest_is_ordinary() -> None:
    found, _ = collecting(on_cpu(40), LOOP, 20, 20.2, aux=0).classify(request(0, 40))
    assert "python.gc" not in found.causes


def test_a_sibling_that_collects_while_the_victim_waits_for_the_interpreter() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(5, LOOP).into(-5, WORKER, cpu=1)
    collecting(b, WORKER, 10, 68).wake(70, LOOP, WORKER).out(71, WORKER, cpu=1).into(70.1, LOOP)
    found, _ = b.send(75, LOOP).out(76, LOOP, nr=EPOLL_WAIT).classify(request(0, 75))
    assert ms_of(found)["python.gc"] == 58
    assert found.culprits["python.gc"].tid == WORKER


def test_a_collection_off_the_path_is_a_decoy() -> None:
    found, ctx = collecting(on_cpu(40), WORKER, 10, 35).classify(request(0, 40))
    assert ms_of(found) == {"work.cpu": 40}
    assert checks(found, ctx)["python.gc"].startswith("no garbage collection")


def test_an_end_that_was_not_seen_is_what_the_thread_did_next() -> None:
    b = on_cpu(60).add("gc_start", 10, LOOP, aux=2).recv(45, LOOP, key=OTHER)
    found, _ = b.classify(request(0, 60))
    assert ms_of(found) == {"python.gc": 35, "work.cpu": 25}
    assert [s.inferred for s in found.segments if s.cause == "python.gc"] == [True]
    # The next collection's begin bounds it, too, and says so itself.
    collecting(b, LOOP, 10, 30, aux=2 | 256)
    found, _ = b.classify(request(0, 60))
    assert ms_of(found)["python.gc"] == 20


# python.pool_exhausted: worker threads


def served(b: EventBuilder) -> Request:
    return request(0, 81, server_port=PORT)


def tell(b: EventBuilder, ms: float, tid: int, key: int) -> EventBuilder:
    """A worker tells LOOP, which then sends on a connection."""
    b.send(ms, tid, 56, aux=1, peer=55).wake(ms, LOOP, tid, nr=44).into(ms + 0.1, LOOP)
    b.recv(ms + 0.2, LOOP, 55, aux=1, peer=56)
    return b.send(ms + 1, LOOP, key, lport=PORT)


def held_pool() -> EventBuilder:
    """The only worker ends another request's job at 50, and this one's, taken up then, at 80."""
    b = EventBuilder().into(-60, LOOP).out(-30, LOOP, nr=EPOLL_WAIT).wake(-0.1, LOOP, context=2, vec=NET_RX)
    b.into(-0.05, LOOP).recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT).into(-40, WORKER, cpu=1)
    tell(b, 50, WORKER, OTHER).out(52, LOOP, nr=EPOLL_WAIT)
    return tell(b, 80, WORKER, COOKIE).out(82, LOOP, nr=EPOLL_WAIT).out(90, WORKER, cpu=1)


def test_a_wait_for_a_worker_thread_names_pool_and_holder() -> None:
    b = held_pool().known(ThreadFact(WORKER, SERVER, "worker-3"))
    found, _ = b.classify(served(b))
    assert ms_of(found)["python.pool_exhausted"] == 49
    culprit = found.culprits["python.pool_exhausted"]
    assert (culprit.kind, culprit.name, culprit.tgid, culprit.tid) == ("thread", "worker", SERVER, WORKER)
    assert culprit.detail.startswith(
        "all 1 threads that work for the event loop busy, longest worker-3 (101)"
    )


def test_a_worker_that_was_woken_for_it_is_no_wait() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT)
    b.into(-99, WORKER, cpu=1).out(-50, WORKER, cpu=1).wake(0.5, WORKER, LOOP).into(0.6, WORKER, cpu=1)
    b.send(-50.1, WORKER, 56, aux=1, peer=55)
    tell(b, 50, WORKER, COOKIE + 1).out(52, LOOP, nr=EPOLL_WAIT)  # a job may tell of its progress
    tell(b, 80, WORKER, COOKIE).out(82, LOOP, nr=EPOLL_WAIT).out(90, WORKER, cpu=1)
    found, ctx = b.classify(served(b))
    assert "python.pool_exhausted" not in found.causes
    assert checks(found, ctx)["python.pool_exhausted"].startswith("no thread or connection went")


def test_a_busy_pool_that_nobody_waits_for_is_a_decoy() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT)
    b.tgids[SECOND] = SERVER
    b.into(-99, WORKER, cpu=1).out(-50, WORKER, cpu=1).wake(0.5, WORKER, LOOP).into(0.6, WORKER, cpu=1)
    b.into(-40, SECOND, cpu=2)
    for ms in (20, 40, 60):
        tell(b, ms, SECOND, OTHER).out(ms + 2, LOOP, nr=EPOLL_WAIT)
    tell(b, 80, WORKER, COOKIE).out(82, LOOP, nr=EPOLL_WAIT).out(90, WORKER, cpu=1).out(91, SECOND, cpu=2)
    found, _ = b.classify(served(b))
    assert "python.pool_exhausted" not in found.causes


def test_a_thread_that_passes_on_what_others_made_is_no_pool() -> None:
    # It rests after each, as an engine's output thread does: others feed it.
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT)
    b.tgids[SECOND] = SERVER
    b.into(-40, SECOND, cpu=2).into(-40, WORKER, cpu=1)
    for ms, key in ((20, OTHER), (50, OTHER), (80, COOKIE)):
        tell(b, ms, WORKER, key).out(ms + 2, LOOP, nr=EPOLL_WAIT)
        b.out(ms + 0.5, WORKER, nr=FUTEX, arg0=4096, cpu=1).wake(ms + 29, WORKER, SECOND)
        b.into(ms + 29.1, WORKER, cpu=1)
    found, _ = b.out(120, SECOND, cpu=2).classify(served(b))
    assert "python.pool_exhausted" not in found.causes


def test_pool_and_loop_at_once_are_both_told() -> None:
    b = EventBuilder().into(-60, LOOP).out(-30, LOOP, nr=EPOLL_WAIT).wake(-0.1, LOOP, context=2, vec=NET_RX)
    b.into(-0.05, LOOP).recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT).into(-40, WORKER, cpu=1)
    tell(b, 50, WORKER, OTHER).out(52, LOOP, nr=EPOLL_WAIT)
    b.send(80, WORKER, 56, aux=1, peer=55).wake(80, LOOP, WORKER, nr=44).into(80.1, LOOP)
    b.recv(80.2, LOOP, 55, aux=1, peer=56).send(150, LOOP, lport=PORT).out(151, LOOP, nr=EPOLL_WAIT)
    found, _ = b.out(90, WORKER, cpu=1).classify(request(0, 150, server_port=PORT))
    causes = ms_of(found)
    assert causes["python.pool_exhausted"] == 49
    assert causes["python.loop_blocked"] == pytest.approx(69.8)


# python.pool_exhausted: threads that serve connections


def test_a_connection_that_waits_for_a_server_thread() -> None:
    b = EventBuilder().into(-40, WORKER).send(60, WORKER, OTHER, lport=PORT).recv(60.5, WORKER, lport=PORT)
    b.tgids[SECOND] = SERVER
    b.into(-40, SECOND, cpu=1).send(30, SECOND, OTHER + 1, lport=PORT).out(99, SECOND, cpu=1)
    b.send(80, WORKER, lport=PORT).out(81, WORKER)
    asked = request(0, 80, start_tid=WORKER, end_tid=WORKER, recv_ns=ns(60.5), server_port=PORT)
    found, _ = b.classify(asked)
    assert ms_of(found) == {"python.pool_exhausted": 60, "work.cpu": 20}
    assert found.culprits["python.pool_exhausted"].detail.startswith(
        "all 2 threads that serve connections busy"
    )


def test_a_server_thread_that_had_nothing_to_do_was_not_waited_for() -> None:
    b = EventBuilder().into(-99, WORKER).send(-60, WORKER, OTHER, lport=PORT).out(-50, WORKER)
    b.tgids[SECOND] = SERVER
    b.send(30, SECOND, OTHER + 1, lport=PORT)
    b.wake(60, WORKER, HOG).into(60.1, WORKER).recv(60.5, WORKER, lport=PORT).send(80, WORKER, lport=PORT)
    asked = request(0, 80, start_tid=WORKER, end_tid=WORKER, recv_ns=ns(60.5), server_port=PORT)
    found, _ = b.out(81, WORKER).classify(asked)
    assert "python.pool_exhausted" not in found.causes


# python.pool_exhausted: connections


def upstream(b: EventBuilder, what: str, ms: float, key: int) -> EventBuilder:
    return b.add(f"sock_{what}", ms, LOOP, aux=2, bytes=5, key=key, lport=50_000 + key, rport=UPSTREAM)


def asked_upstream() -> EventBuilder:
    """Both connections are busy with others' requests; K1 is used for this one at 40.2, as soon as it is free."""
    b = EventBuilder().into(-50, LOOP)
    upstream(upstream(b, "send", -30, K1), "send", -20, K2)
    b.recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT).wake(40, LOOP, context=2, vec=NET_RX).into(
        40, LOOP
    )
    upstream(upstream(b, "recv", 40.1, K1), "send", 40.2, K1)
    b.out(40.5, LOOP, nr=EPOLL_WAIT).wake(50, LOOP, context=2, vec=NET_RX).into(50, LOOP)
    return upstream(b, "recv", 50.1, K1).send(51, LOOP, lport=PORT).out(52, LOOP, nr=EPOLL_WAIT)


def test_a_wait_for_an_upstream_connection() -> None:
    found, _ = asked_upstream().classify(request(0, 51, server_port=PORT))
    causes = ms_of(found)
    assert causes["python.pool_exhausted"] == 39
    assert causes["work.peer"] == 9.5
    culprit = found.culprits["python.pool_exhausted"]
    assert culprit.name == f"2 connections to port {UPSTREAM}"
    assert culprit.detail == "all busy until one was used again 0.1 ms after its last response"


def test_what_the_loop_reads_for_others_while_a_worker_has_the_request_is_not_its_own() -> None:
    b = EventBuilder().into(-50, LOOP)
    upstream(upstream(b, "send", -30, K1), "send", -20, K2)
    b.recv(0, LOOP, lport=PORT).out(1, LOOP, nr=EPOLL_WAIT).wake(40, LOOP, context=2, vec=NET_RX).into(
        40, LOOP
    )
    upstream(upstream(b, "recv", 40.1, K1), "send", 40.2, K1)
    b.out(40.5, LOOP, nr=EPOLL_WAIT).wake(50, LOOP, context=2, vec=NET_RX).into(50, LOOP)
    upstream(b, "recv", 50.1, K1).out(-90, WORKER, cpu=1).wake(50.3, WORKER, LOOP).out(
        51, LOOP, nr=EPOLL_WAIT
    )
    b.into(50.4, WORKER, cpu=1).wake(60, LOOP, context=2, vec=NET_RX).into(60, LOOP)
    upstream(upstream(b, "recv", 60.1, K2), "send", 60.2, K2).out(61, LOOP, nr=EPOLL_WAIT)
    b.wake(80, LOOP, WORKER).into(80.1, LOOP)
    upstream(b, "recv", 80.3, K2).send(81, LOOP, lport=PORT).out(82, LOOP, nr=EPOLL_WAIT)
    found, _ = b.out(82, WORKER, cpu=1).classify(request(0, 81, server_port=PORT))
    assert ms_of(found)["python.pool_exhausted"] == 39


@pytest.mark.parametrize("case", ["idle", "new", "later"])
def test_a_connection_that_was_free_or_new_is_no_full_pool(case: str) -> None:
    b = asked_upstream()
    if case == "idle":
        upstream(b, "recv", -10, K2)
    elif case == "new":
        upstream(b, "send", 5, K3)
    else:
        upstream(b, "recv", 0.5, K1)  # it had rested since long
        b.rows = [r for r in b.rows if r[0] != ns(40.1)]
    found, _ = b.classify(request(0, 51, server_port=PORT))
    assert "python.pool_exhausted" not in found.causes


def test_a_slow_upstream_is_no_pool() -> None:
    b = EventBuilder().into(-50, LOOP).recv(0, LOOP, lport=PORT)
    upstream(b, "send", 0.5, K1).out(1, LOOP, nr=EPOLL_WAIT).wake(50, LOOP, context=2, vec=NET_RX).into(
        50, LOOP
    )
    b = upstream(b, "recv", 50.1, K1).send(51, LOOP, lport=PORT).out(52, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 51, server_port=PORT))
    assert ms_of(found) == {"work.cpu": 2, "work.peer": 49}


# python.fd_exhausted


def refused(b: EventBuilder, ms: float, tid: int = LOOP, nr: int = ACCEPT4) -> EventBuilder:
    return b.add("descriptor_refused", ms, tid, aux=EMFILE, limit=64, syscall_nr=nr, times=3)


def not_accepted() -> EventBuilder:
    """LOOP sleeps until 60 although a connection came at 2."""
    b = EventBuilder().into(-5, LOOP).out(6, LOOP, nr=EPOLL_WAIT).wake(60, LOOP, context=1).into(60, LOOP)
    return b.recv(60, LOOP).send(70, LOOP).out(71, LOOP, nr=EPOLL_WAIT)


def test_a_connection_that_could_not_be_accepted_names_process_limit_and_kinds() -> None:
    b = refused(not_accepted(), 5)
    b.known(DescriptorsFact(SERVER, 64, 64, {"file": 14, "socket": 50}))
    found, _ = b.classify(request(2, 70, recv_ns=ns(60)))
    assert ms_of(found) == {"python.fd_exhausted": 58, "work.cpu": 10}
    culprit = found.culprits["python.fd_exhausted"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "server", SERVER)
    assert culprit.detail == "limit of 64 descriptors (RLIMIT_NOFILE), 64 open: 50 socket, 14 file"
    assert (
        "accept4 failed 3 times, since server has no descriptor left"
        in found.evidence["python.fd_exhausted"][1]
    )


def test_one_that_came_while_the_server_had_given_up_for_a_second() -> None:
    found, _ = refused(not_accepted(), -800).classify(request(2, 70, recv_ns=ns(60)))
    assert ms_of(found)["python.fd_exhausted"] == 58
    assert all(s.inferred for s in found.segments if s.cause == "python.fd_exhausted")


@pytest.mark.parametrize("case", ["kept", "another", "long ago", "file"])
def test_a_refusal_that_has_nothing_to_do_with_it(case: str) -> None:
    b, more = not_accepted(), {}
    if case == "kept":
        more = {"seq": 4}  # its connection has been accepted long ago
        refused(b, 5)
    elif case == "another":
        refused(b, 5, HOG)
    elif case == "long ago":
        refused(b, -900, LOOP)
        b.rows = [(r[0] - 3_000_000_000, r[1]) if r[0] == ns(-900) else r for r in b.rows]
        b.rows = [r for r in b.rows if r[0] > 0]
    else:
        refused(b, 5, WORKER, OPENAT)
    found, ctx = b.classify(request(2, 70, recv_ns=ns(60), **more))
    assert "python.fd_exhausted" not in found.causes
    if case == "file":
        assert checks(found, ctx)["python.fd_exhausted"].endswith("but nothing of it held this request up")


def test_a_nap_before_the_next_try() -> None:
    b = refused(EventBuilder().into(-5, LOOP).recv(0, LOOP), 5, LOOP, OPENAT)
    b.out(5.5, LOOP, nr=NANOSLEEP).wake(45, LOOP, context=1).into(45, LOOP).send(50, LOOP)
    found, _ = b.out(51, LOOP, nr=EPOLL_WAIT).classify(request(0, 50))
    assert ms_of(found)["python.fd_exhausted"] == 39.5


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"status": 500, "ended_by": "server"}, True),
        ({"status": 404, "ended_by": "server"}, False),
        ({"status": 0, "outcome": "reset", "ended_by": "server_reset"}, True),
        ({"status": 0, "outcome": "reset", "ended_by": "client_close"}, False),
    ],
)
def test_a_request_that_failed_for_lack_of_a_descriptor(fields: dict[str, object], right: bool) -> None:
    b = refused(on_cpu(20), 10, LOOP, OPENAT)
    _, ctx = b.classify(request(0, 20, **{"outcome": "error", **fields}))
    claim = FD_EXHAUSTED.ended(ctx)
    assert (claim is not None) is right
    if claim is not None:
        assert claim.detail == "openat failed 3 times, since server has no descriptor left"
    _, ctx = on_cpu(20).classify(request(0, 20, **{"outcome": "error", **fields}))
    assert FD_EXHAUSTED.ended(ctx) is None


def test_open_descriptors_are_counted_by_kind_once_a_second(tmp_path: Path) -> None:
    fds = tmp_path / "100" / "fd"
    fds.mkdir(parents=True)
    for i, target in enumerate(
        [
            "socket:[1]",
            "socket:[2]",
            "pipe:[3]",
            "/var/log/x",
            "anon_inode:[eventfd]",
            "anon_inode:[eventpoll]",
        ]
    ):
        (fds / str(i)).symlink_to(target)
    kinds = {"event": 2, "file": 1, "pipe": 1, "socket": 2}
    assert descriptors_fact(100, 64, tmp_path) == DescriptorsFact(100, 64, 6, kinds)
    assert descriptors_fact(101, 64, tmp_path) is None
    rows = refused(EventBuilder(), 0).timelines(0, 0).select("descriptor_refused")
    counts = DescriptorCounts(tmp_path)
    assert [len(counts.facts(rows, now)) for now in (5.0, 5.5, 6.0)] == [1, 0, 1]


# engine.jit_compile where no engine tells of itself


def test_a_compiler_that_the_request_waits_for() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(5, LOOP, nr=WAIT4)
    b.add("sched_fork", 4, LOOP, child_tid=300, child_tgid=300, comm=b"server")
    b.into(5, 300).add("sched_exec", 6, 300, comm=b"cc1").wake(65, LOOP, 300).out(65.1, 300).into(65.2, LOOP)
    b.known(ProcessFact(300, "cc1", service="svc", parent=SERVER)).send(70, LOOP).out(71, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["engine.jit_compile"] == 61  # from its fork on
    culprit = found.culprits["engine.jit_compile"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "cc1", 300)


def test_another_program_that_the_request_waits_for_is_no_compiler() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(5, LOOP, nr=WAIT4).into(5, 300)
    b.wake(65, LOOP, 300).out(65.1, 300).into(65.2, LOOP)
    b.known(ProcessFact(300, "ffmpeg", service="svc")).send(70, LOOP).out(71, LOOP, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 70))
    assert "engine.jit_compile" not in found.causes
