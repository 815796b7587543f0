"""The walk: which thread's time explains a request, and that it always tiles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import critical_path
from whyspan.critical_path import NET_RX, Path, PathSegment, TilingError, check, cuts, own_threads, walk
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, THROTTLED, UNKNOWN_STATE, WAKEUP

from tests.unit.lossy import lossy_events
from tests.unit.timeline import (
    COOKIE,
    EPOLL_WAIT,
    HOG,
    LOOP,
    NANOSLEEP,
    SENDTO,
    SERVER,
    WORKER,
    EventBuilder,
    ns,
    request,
    shape,
)

OTHER = 102
PEER, PEER_LOOP = 300, 300


def handed_over() -> EventBuilder:
    """The loop reads a head at 0, hands to the worker, which sleeps and works; the loop answers at 50."""
    b = EventBuilder()
    b.into(-20, LOOP).into(-30, WORKER, cpu=1).out(-25, WORKER, cpu=1)
    b.wake(1, WORKER, LOOP).into(2, WORKER, cpu=1).out(3, LOOP, nr=EPOLL_WAIT)
    b.out(10, WORKER, nr=NANOSLEEP, cpu=1).wake(30, WORKER, context=1).into(31, WORKER, cpu=1)
    b.edge("edge_write", 45, WORKER).wake(45.01, LOOP, WORKER, nr=1).out(46, WORKER, cpu=1)
    b.into(47, LOOP).edge("edge_read", 47.1, LOOP).send(50, LOOP).out(52, LOOP, nr=EPOLL_WAIT)
    return b


def test_follows_the_waker_through_a_hand_over() -> None:
    path, _ = handed_over().walk(request(0, 50))
    assert shape(path) == [
        (0, 1, LOOP, RUNNING),
        (1, 2, WORKER, WAKEUP),
        (2, 10, WORKER, RUNNING),
        (10, 30, WORKER, BLOCKED),
        (30, 31, WORKER, WAKEUP),
        (31, 45.01, WORKER, RUNNING),
        (45.01, 47, LOOP, WAKEUP),
        (47, 50, LOOP, RUNNING),
    ]


def test_data_that_came_while_the_reader_ran_beats_its_wake_up() -> None:
    # The loop, woken by somebody else at 20, is busy from 21 to 60; the worker's result came at 45.
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).out(5, LOOP, nr=EPOLL_WAIT)
    b.wake(20, LOOP, OTHER).into(21, LOOP).edge("edge_write", 45, WORKER).edge("edge_read", 60, LOOP)
    b.out(70, LOOP, nr=EPOLL_WAIT).out(46, WORKER)
    path, _ = b.walk(request(0, 65))
    assert shape(path) == [(0, 45, WORKER, RUNNING), (45, 65, LOOP, RUNNING)]


def test_data_that_came_while_the_reader_waited_for_a_cpu() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).out(5, LOOP, nr=EPOLL_WAIT)
    b.wake(20, LOOP, OTHER).edge("edge_write", 24, WORKER).into(30, LOOP).edge("edge_read", 31, LOOP)
    b.out(40, LOOP).out(46, WORKER)
    path, _ = b.walk(request(0, 35))
    assert shape(path) == [(0, 24, WORKER, RUNNING), (24, 30, LOOP, WAKEUP), (30, 35, LOOP, RUNNING)]


def test_data_that_came_in_an_earlier_run_of_a_preempted_reader() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).edge("edge_write", 10, WORKER)
    b.out(20, LOOP, 0, next_tid=HOG).into(25, LOOP, HOG).edge("edge_read", 28, LOOP)
    b.out(40, LOOP).out(46, WORKER)
    path, _ = b.walk(request(0, 30))
    assert shape(path) == [
        (0, 10, WORKER, RUNNING),
        (10, 20, LOOP, RUNNING),
        (20, 25, LOOP, RUNNABLE),
        (25, 30, LOOP, RUNNING),
    ]


@pytest.mark.parametrize("offsets", [(40, 60), (0, 500)])
def test_unix_sockets_pair_by_key_and_offset(offsets: tuple[int, int]) -> None:
    sent, _ = offsets
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).into(-5, OTHER, cpu=1)
    b.tgids[OTHER] = SERVER
    b.send(8, OTHER, 8, aux=1, peer=9, offset=0, bytes=sent)
    b.recv(9, LOOP, 9, aux=1, peer=8, offset=0, bytes=sent)
    b.send(10, WORKER, 8, aux=1, peer=9, offset=sent, bytes=20)
    b.recv(28, LOOP, 9, aux=1, peer=8, offset=sent, bytes=20).out(40, LOOP).out(40, WORKER).out(40, OTHER)
    path, _ = b.walk(request(0, 30))
    assert shape(path) == [(0, 10, WORKER, RUNNING), (10, 30, LOOP, RUNNING)]


def test_loopback_pairs_by_swapped_ports() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, PEER_LOOP, cpu=1)
    b.send(10, PEER_LOOP, 31, lport=9000, rport=5555, offset=70, bytes=20)
    b.recv(28, LOOP, 32, lport=5555, rport=9000, offset=70, bytes=20).out(40, LOOP).out(40, PEER_LOOP)
    path, _ = b.walk(request(0, 30))
    assert shape(path) == [(0, 10, PEER_LOOP, RUNNING), (10, 30, LOOP, RUNNING)]
    assert path.segments[0].tgid == PEER


def test_one_read_of_many_writes_goes_to_the_requests_own_worker() -> None:
    # OTHER wrote first, for somebody else; the worker was woken by the loop for this request.
    b = EventBuilder().into(-5, LOOP).into(-5, OTHER, cpu=1).out(-4, WORKER)
    b.wake(1, WORKER, LOOP).into(2, WORKER).edge("edge_write", 8, OTHER).edge("edge_write", 12, WORKER)
    b.edge("edge_read", 28, LOOP).out(40, LOOP).out(40, WORKER).out(40, OTHER)
    path, timelines = b.walk(request(0, 30))
    assert own_threads(timelines, request(0, 30)) == {WORKER}
    assert shape(path)[-2:] == [(2, 12, WORKER, RUNNING), (12, 30, LOOP, RUNNING)]


def test_a_failed_read_is_no_edge() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).edge("edge_write", 10, WORKER)
    b.edge("edge_read", 20, LOOP, bytes=-11).out(40, LOOP).out(40, WORKER)
    assert shape(b.walk(request(0, 30))[0]) == [(0, 30, LOOP, RUNNING)]


def test_a_timer_ends_the_chain() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, nr=NANOSLEEP).wake(25, LOOP, WORKER, context=1)
    b.into(25.5, LOOP).out(40, LOOP).into(-5, WORKER)
    path, _ = b.walk(request(0, 30))
    assert shape(path) == [
        (0, 10, LOOP, RUNNING),
        (10, 25, LOOP, BLOCKED),
        (25, 25.5, LOOP, WAKEUP),
        (25.5, 30, LOOP, RUNNING),
    ]
    assert path.hops == 0


def test_a_loopback_send_wakes_from_inside_the_softirq() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, PEER_LOOP).out(10, LOOP, nr=EPOLL_WAIT)
    b.wake(25, LOOP, PEER_LOOP, context=2, nr=SENDTO, vec=NET_RX).into(26, LOOP).out(40, LOOP).out(
        40, PEER_LOOP
    )
    assert shape(b.walk(request(0, 30))[0])[0] == (0, 25, PEER_LOOP, RUNNING)


def test_network_data_from_a_watched_sender_is_found_by_its_bytes() -> None:
    # The softirq ran in the idle task: the wake-up names nobody, the bytes do.
    b = EventBuilder().into(-5, LOOP).into(-5, PEER_LOOP).out(10, LOOP, nr=EPOLL_WAIT)
    b.send(24, PEER_LOOP, 31, lport=9000, rport=5555).wake(25, LOOP, HOG, context=2, vec=NET_RX).into(
        26, LOOP
    )
    b.recv(27, LOOP, 32, lport=5555, rport=9000).out(40, LOOP).out(40, PEER_LOOP)
    assert shape(b.walk(request(0, 30))[0])[:2] == [(0, 24, PEER_LOOP, RUNNING), (24, 25, LOOP, BLOCKED)]


def test_an_unwatched_waker_is_where_the_chain_ends() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, nr=1).wake(25, LOOP, HOG).into(26, LOOP).out(40, LOOP)
    path, _ = b.walk(request(0, 30))
    blocked = path.segments[1]
    assert (blocked.state, blocked.inferred) == (BLOCKED, False)
    assert blocked.wait is not None
    assert blocked.wait.waker_tgid == HOG


def test_a_watched_waker_whose_switches_were_lost_is_not_guessed_at() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP).wake(25, LOOP, WORKER).into(26, LOOP).out(40, LOOP)
    b.into(35, WORKER)
    path, _ = b.walk(request(0, 30))
    assert shape(path)[1] == (10, 25, LOOP, BLOCKED)
    assert path.segments[1].inferred


def test_a_new_thread_is_its_parents_doing() -> None:
    b = EventBuilder().into(-5, LOOP).add("sched_fork", 10, LOOP, child_tid=WORKER, child_tgid=SERVER)
    b.into(12, WORKER, cpu=1).out(40, WORKER, cpu=1).out(40, LOOP)
    path, _ = b.walk(request(0, 30, end_tid=WORKER))
    assert shape(path) == [(0, 10, LOOP, RUNNING), (10, 12, WORKER, WAKEUP), (12, 30, WORKER, RUNNING)]


def test_throttled_and_what_follows_it() -> None:
    b = EventBuilder().into(-5, LOOP).out(5, LOOP, 0, flags=6).into(25, LOOP, throttled_ms=15).out(40, LOOP)
    assert shape(b.walk(request(0, 30))[0]) == [
        (0, 5, LOOP, RUNNING),
        (5, 20, LOOP, THROTTLED),
        (20, 25, LOOP, RUNNABLE),
        (25, 30, LOOP, RUNNING),
    ]


def test_nothing_seen_is_unknown() -> None:
    path, _ = EventBuilder().walk(request(0, 30))
    assert shape(path) == [(0, 30, LOOP, UNKNOWN_STATE)]


def test_an_empty_request_has_an_empty_path() -> None:
    assert EventBuilder().walk(request(5, 5))[0].segments == []
    assert EventBuilder().walk(request(5, 4))[0].segments == []


def test_two_threads_that_wake_each_other_at_one_moment_end_in_unknown() -> None:
    b = EventBuilder()
    for tid, other in ((LOOP, WORKER), (WORKER, LOOP)):
        b.into(-5, tid).out(5, tid).wake(20, tid, other).into(20, tid).out(40, tid)
    path, _ = b.walk(request(0, 30))
    check(path)
    assert path.segments[-1].state == RUNNING


def test_the_step_limit_leaves_the_rest_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_path, "MAX_STEPS", 4)
    path, _ = handed_over().walk(request(0, 50))
    assert path.segments[0].state == UNKNOWN_STATE
    assert path.segments[-1].state == RUNNING


def test_every_write_of_the_response_ends_a_slice_on_its_thread() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).send(10, WORKER).send(20, LOOP).out(40, LOOP)
    b.out(40, WORKER).send(15, LOOP, key=COOKIE + 1)
    assert shape(b.walk(request(0, 30))[0]) == [(0, 10, WORKER, RUNNING), (10, 30, LOOP, RUNNING)]


def test_a_foreign_process_on_the_same_cookie_cuts_nothing() -> None:
    b = EventBuilder().into(-5, LOOP).send(10, HOG).out(40, LOOP)
    assert cuts(b.timelines(0, 30), request(0, 30)) == [(ns(30), LOOP, SERVER)]


def test_at_most_256_slices() -> None:
    b = EventBuilder()
    for i in range(1, 1000):
        b.send(i, LOOP)
    found = cuts(b.timelines(0, 1000), request(0, 1000))
    assert len(found) == 256
    assert found[-1][0] == ns(1000)
    assert [c[0] for c in found] == sorted({c[0] for c in found})


def test_a_request_without_an_end_thread_ends_on_its_last_writer() -> None:
    b = EventBuilder().send(10, WORKER)
    assert cuts(b.timelines(0, 30), request(0, 30, end_tid=0))[-1] == (ns(30), WORKER, SERVER)
    assert cuts(EventBuilder().timelines(0, 30), request(0, 30, end_tid=0))[-1] == (ns(30), LOOP, SERVER)


def test_check_refuses_gaps_overlaps_and_empty_pieces() -> None:
    def piece(a: int, z: int) -> PathSegment:
        return PathSegment(a, z, 1, 1, RUNNING)

    check(Path(0, 10, [piece(0, 4), piece(4, 10)], 0))
    for bad in (
        [piece(0, 4), piece(5, 10)],
        [piece(0, 6), piece(5, 10)],
        [piece(0, 10), piece(10, 10)],
        [],
        [piece(0, 9)],
    ):
        with pytest.raises(TilingError):
            check(Path(0, 10, bad, 0))


def test_a_cut_does_not_make_a_long_wait_short() -> None:
    b = EventBuilder().into(-50, LOOP).out(-40, LOOP, nr=1).wake(25, LOOP, HOG).into(26, LOOP).out(40, LOOP)
    path, _ = b.walk(request(20, 30))
    assert path.segments[0].ns == 5_000_000
    assert path.segments[0].whole_ns == 65_000_000


@settings(max_examples=300, deadline=None)
@given(lossy_events(), st.integers(-5, 60), st.integers(0, 60), st.sampled_from((LOOP, WORKER, HOG, 0)))
def test_any_events_tile_to_the_nanosecond(b: EventBuilder, start: int, length: int, end_tid: int) -> None:
    wanted = request(start, start + length, end_tid=end_tid)
    timelines = b.timelines(0, 60, 20, 40)
    path = walk(timelines, wanted)
    assert sum(s.ns for s in path.segments) == wanted.end_ns - wanted.start_ns
    assert all(s.ns > 0 for s in path.segments)
    assert all(a.end_ns == z.start_ns for a, z in zip(path.segments, path.segments[1:], strict=False))
    assert walk(b.timelines(0, 60), wanted) == path  # however the events were batched


def test_a_slow_path_is_found_at_the_socket_across_processes_and_batches() -> None:
    # Front end (loop) -> unix socket -> engine process, which is preempted -> unix socket -> loop.
    engine = 400
    b = EventBuilder().into(-9, LOOP).into(-9, engine, cpu=1).out(-8, engine, nr=EPOLL_WAIT, cpu=1)
    b.wake(2, engine, LOOP, nr=SENDTO).send(2.1, LOOP, 8, aux=1, peer=9).out(3, LOOP, nr=EPOLL_WAIT)
    b.into(4, engine, cpu=1).recv(4.1, engine, 9, aux=1, peer=8).out(10, engine, 0, next_tid=HOG, cpu=1)
    b.into(80, engine, HOG, cpu=1).wake(90, LOOP, engine, nr=SENDTO).send(90.1, engine, 9, aux=1, peer=8)
    b.into(91, LOOP).recv(91.1, LOOP, 8, aux=1, peer=9).send(95, LOOP).out(96, LOOP).out(97, engine, cpu=1)
    # A send is stamped at its end, just after the wake-up it causes: until then it is the sender's time.
    expected = [
        (0, 2.1, LOOP, RUNNING),
        (2.1, 4, engine, WAKEUP),
        (4, 10, engine, RUNNING),
        (10, 80, engine, RUNNABLE),
        (80, 90.1, engine, RUNNING),
        (90.1, 91, LOOP, WAKEUP),
        (91, 95, LOOP, RUNNING),
    ]
    assert shape(b.walk(request(0, 95))[0]) == expected
    assert shape(walk(b.timelines(0, 95, 1, 5, 50, 90.05), request(0, 95))) == expected


def test_a_long_relay_between_running_threads_is_no_cycle() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1)
    for t in range(1, 41, 2):
        b.edge("edge_write", t, LOOP, key=5).edge("edge_read", t + 0.5, WORKER, key=5)
        b.edge("edge_write", t + 1, WORKER, key=6).edge("edge_read", t + 1.5, LOOP, key=6)
    b.out(60, LOOP).out(60, WORKER, cpu=1)
    path, _ = b.walk(request(0, 45))
    assert path.hops == 40
    assert shape(path)[-2:] == [(39, 40, WORKER, RUNNING), (40, 45, LOOP, RUNNING)]
    assert path.ns(RUNNING) == 45_000_000
