"""Rules on waits for input and output, and usual work: claims, refusals and culprits."""

from __future__ import annotations

import pytest
from whyspan.causes import rule_out
from whyspan.critical_path import NET_RX
from whyspan.model import Culprit, FdFact, ProcessFact

from tests.unit.timeline import (
    EPOLL_WAIT,
    FSYNC,
    HOG,
    LOOP,
    MS,
    NANOSLEEP,
    SERVER,
    WRITE,
    D,
    EventBuilder,
    ms_of,
    ns,
    request,
)

LOG_READER = 800
PIPE, SOCKET, FILE = 3, 4, 1


# io.log_blocked


def writing(fd: int, kind: int = 0, nr: int = WRITE, waker: int = LOG_READER, **out: int) -> EventBuilder:
    """LOOP blocks in a write 10-60."""
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(10, LOOP, nr=nr, arg0=fd, **out)
    if kind:
        b.add("fd_block", 10, LOOP, aux=kind, fd=fd, inode=4, key=5, syscall_nr=nr)
    b.known(ProcessFact(LOG_READER, "logshipper"))
    return b.wake(60, LOOP, waker).into(60.1, LOOP).send(70, LOOP).out(71, LOOP, nr=EPOLL_WAIT)


def test_a_full_output_pipe_names_its_reader() -> None:
    found, _ = writing(1, PIPE).classify(request(0, 70))
    assert ms_of(found)["io.log_blocked"] == 50
    assert found.culprits["io.log_blocked"] == Culprit(
        kind="process", name="logshipper", tgid=LOG_READER, detail="reads descriptor 1 of server"
    )


def test_what_is_known_of_the_pipe_beats_the_waker() -> None:
    b = writing(1, PIPE).known(FdFact(SERVER, 1, 4, "pipe", "", 777, "vector"))
    found, _ = b.classify(request(0, 70))
    assert found.culprits["io.log_blocked"].name == "vector"


def test_a_reused_descriptor_number_is_not_believed() -> None:
    b = writing(9, FILE).known(FdFact(SERVER, 9, 999, "file", "/tmp/old.log"))
    found, _ = b.classify(request(0, 70))
    assert "io.log_blocked" not in found.causes


@pytest.mark.parametrize("nr", [WRITE, FSYNC])
def test_a_log_file_is_known_by_its_name(nr: int) -> None:
    b = writing(9, FILE, nr, 0, state=D).known(FdFact(SERVER, 9, 4, "file", "/data/app.log"))
    b.add("block_done", 59, HOG, issue_ns=ns(12), latency_ns=47 * MS, dev=8 << 20, bytes=4096)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["io.log_blocked"] == 50
    assert found.culprits["io.log_blocked"].name == "/data/app.log"
    assert "io.disk_contention" not in found.causes


@pytest.mark.parametrize(("fd", "kind"), [(9, SOCKET), (1, SOCKET), (9, FILE), (9, 0)])
def test_other_writes_are_not_logs(fd: int, kind: int) -> None:
    found, ctx = writing(fd, kind).classify(request(0, 70))
    assert "io.log_blocked" not in found.causes
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["io.log_blocked"].startswith("blocked writing 50.0 ms, the longest 50.0 ms")


def test_a_short_write_to_the_log_is_ordinary() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .out(10, LOOP, nr=WRITE, arg0=1)
        .wake(19, LOOP, LOG_READER)
        .into(20, LOOP)
    )
    found, _ = b.out(40, LOOP).classify(request(0, 30))
    assert "io.log_blocked" not in found.causes


def test_many_short_blocks_in_one_long_write_count() -> None:
    b = EventBuilder().into(-5, LOOP)
    for t in range(10, 40, 6):
        b.out(t, LOOP, nr=WRITE, arg0=1).add("fd_block", t, LOOP, aux=PIPE, fd=1)
        b.wake(t + 5, LOOP, LOG_READER).into(t + 5, LOOP)
    b.add("edge_write", 9.9, LOOP, aux=2, duration_ns=30 * MS, bytes=100_000, fd=1).out(60, LOOP)
    found, _ = b.classify(request(0, 50))
    assert ms_of(found)["io.log_blocked"] == 25


def test_blocked_in_the_log_inside_a_go_of_the_loop_is_the_logs_fault() -> None:
    b = writing(1, PIPE)
    b.rows = [r for r in b.rows if r[0] not in (ns(70),)]
    b.send(120, LOOP).out(119.9, LOOP, 0).into(119.95, LOOP)
    found, _ = b.classify(request(0, 69))
    assert ms_of(found)["io.log_blocked"] == 50


# io.disk_contention


def on_disk(other_bytes: int) -> EventBuilder:
    """LOOP waits 50 ms for fsync of a data file; a writer outside the service moves *other_bytes*."""
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, D, nr=FSYNC, arg0=9).wake(60, LOOP, context=2, vec=4)
    b.known(FdFact(SERVER, 9, 0, "file", "/data/kv.db"), ProcessFact(555, "dd"))
    b.add("block_done", 59, LOOP, aux=1, issue_ns=ns(12), latency_ns=47 * MS, dev=8 << 20 | 16, bytes=4096)
    if other_bytes:
        b.add("block_done", 40, 555, issue_ns=ns(5), latency_ns=35 * MS, dev=8 << 20 | 16, bytes=other_bytes)
    return b.into(60.1, LOOP).send(70, LOOP).out(80, LOOP)


def test_a_disk_wait_names_whoever_moved_most() -> None:
    found, _ = on_disk(1 << 20).classify(request(0, 70))
    assert ms_of(found)["io.disk_contention"] == 50
    culprit = found.culprits["io.disk_contention"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "dd", 555)
    assert "device 8:16" in culprit.detail


def test_of_several_neighbours_the_one_that_moved_most_is_named() -> None:
    b = on_disk(1 << 20)
    for tid in (556, 557):
        moved = (1 << 20) + tid
        b.add("block_done", 40, tid, issue_ns=ns(5), latency_ns=35 * MS, dev=8 << 20 | 16, bytes=moved)
    found, _ = b.classify(request(0, 100))
    culprit = found.culprits["io.disk_contention"]
    assert (culprit.kind, culprit.tid) == ("process", 557)


def test_a_slow_disk_without_a_neighbour_is_named_itself() -> None:
    found, _ = on_disk(0).classify(request(0, 70))
    assert found.culprits["io.disk_contention"].name == "device 8:16"


def test_disk_traffic_beside_a_thread_that_does_not_wait_for_it_is_a_decoy() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, nr=NANOSLEEP).wake(60, LOOP, context=1).into(60, LOOP)
    b.add("block_done", 40, 555, issue_ns=ns(5), latency_ns=35 * MS, dev=8 << 20, bytes=1 << 20).out(80, LOOP)
    found, ctx = b.classify(request(0, 70))
    assert ms_of(found) == {"work.cpu": 20, "work.timer": 50}
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["io.disk_contention"].endswith("on the path 0.0 ms")


def test_an_uninterruptible_wait_without_block_requests_is_not_a_disk() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .out(10, LOOP, D, nr=FSYNC)
        .wake(60, LOOP, context=2, vec=4)
        .into(60, LOOP)
    )
    found, _ = b.out(80, LOOP).classify(request(0, 70))
    assert ms_of(found) == {"work.blocked": 50, "work.cpu": 20}


# usual work


@pytest.mark.parametrize(
    ("out", "wake", "cause"),
    [
        ({"nr": NANOSLEEP}, {"context": 1}, "work.timer"),
        ({"nr": EPOLL_WAIT}, {"context": 2, "vec": NET_RX}, "work.peer"),
        ({"nr": 42}, {"context": 2, "vec": 1}, "work.timer"),
        ({"nr": 0}, {"by": HOG}, "work.blocked"),
        ({"nr": 0}, {"context": 3}, "work.blocked"),
        ({"nr": -2}, {"by": HOG}, "work.blocked"),
    ],
)
def test_usual_waits(out: dict[str, int], wake: dict[str, int], cause: str) -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, **out).wake(60, LOOP, **wake)
    found, _ = b.into(60, LOOP).out(80, LOOP).classify(request(0, 70))
    assert ms_of(found) == {cause: 50, "work.cpu": 20}


@pytest.mark.parametrize(("kind", "cause"), [(PIPE, "work.pipe"), (SOCKET, "work.peer"), (5, "work.blocked")])
def test_usual_waits_by_descriptor(kind: int, cause: str) -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, nr=0, arg0=9).add("fd_block", 10, LOOP, aux=kind, fd=9)
    found, _ = b.wake(60, LOOP, HOG).into(60, LOOP).out(80, LOOP).classify(request(0, 70))
    assert ms_of(found) == {cause: 50, "work.cpu": 20}
    assert any(s.detail == "read, ended by hog" for s in found.segments)


def test_what_was_lost_is_unknown() -> None:
    b = EventBuilder().into(40, LOOP).out(80, LOOP)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found) == {"unknown": 40, "work.cpu": 30}
