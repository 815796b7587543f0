"""An engine that spins: no wake-up tells what it waited for, its helpers' messages do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.critical_path import check, walk
from whyspan.inbox import Inboxes, handover
from whyspan.model import ProcessFact
from whyspan.timeline import RUNNABLE, RUNNING, THROTTLED, WAKEUP

from tests.unit.lossy import lossy_events
from tests.unit.timeline import EPOLL_WAIT, HOG, LOOP, SERVER, EventBuilder, ns, request, shape

SENDER = 110  # the front end's I/O thread
CORE, CORE_IO, CORE_INPUT = 200, 210, 211
MODEL, MODEL_IO = 300, 310
QUEUED_KEY, TAKEN_KEY = 5, 6
YIELDED = 8


def spinning(b: EventBuilder, tid: int, *yields_ms: float, cpu: int) -> None:
    """The thread has a CPU all the time but for moments, at which it gives it away."""
    b.into(-150, tid, cpu=cpu)
    for at in yields_ms:
        b.out(at, tid, 0, flags=YIELDED, nr=-2, cpu=cpu).into(at + 0.01, tid, cpu=cpu)


def helper(b: EventBuilder, tid: int, woken_ms: float, by: int, rest_ms: float) -> None:
    """A thread that sleeps in epoll, is woken and comes to rest again."""
    b.into(-160, tid).out(-155, tid, nr=EPOLL_WAIT)
    b.wake(woken_ms, tid, by).into(woken_ms + 0.1, tid).out(rest_ms, tid, nr=EPOLL_WAIT)


def message(b: EventBuilder, sent: tuple[float, int], read: tuple[float, int], key: int) -> None:
    """Ten bytes over a unix socket whose ends are *key* and *key* + 1."""
    b.send(*sent, key, aux=1, peer=key + 1)
    b.recv(*read, key + 1, aux=1, peer=key)


def engine(core_spins: bool = True) -> EventBuilder:
    """The front end is busy until 20 and hands over; the core sends to the model at 25, which answers at 45."""
    b = EventBuilder()
    b.tgids |= {SENDER: SERVER, CORE_IO: CORE, CORE_INPUT: CORE, MODEL_IO: MODEL}
    b.known(ProcessFact(CORE, "core", service="svc"), ProcessFact(MODEL, "model", service="svc"))
    b.into(-5, LOOP).edge("edge_write", 20, LOOP, QUEUED_KEY)
    helper(b, SENDER, 20, LOOP, 20.6)
    b.edge("edge_read", 20.2, SENDER, QUEUED_KEY)
    message(b, (20.5, SENDER), (20.7, CORE_IO), 1000)
    helper(b, CORE_INPUT, 20.8, CORE_IO, 22)
    b.edge("edge_write", 20.8, CORE_IO, TAKEN_KEY).edge("edge_read", 21, CORE_INPUT, TAKEN_KEY)
    b.into(-160, CORE_IO).out(-155, CORE_IO, nr=EPOLL_WAIT)
    b.wake(20.5, CORE_IO, SENDER).into(20.6, CORE_IO).out(20.9, CORE_IO, nr=EPOLL_WAIT)
    b.wake(45, CORE_IO, MODEL).into(45.1, CORE_IO).out(45.3, CORE_IO, nr=EPOLL_WAIT)
    spinning(b, CORE, *([30.0, 40.0] if core_spins else []), cpu=1)
    spinning(b, MODEL, 10.0, cpu=2)
    message(b, (25, CORE), (25.2, MODEL_IO), 2000)
    helper(b, MODEL_IO, 25, CORE, 25.4)
    message(b, (45, MODEL), (45.2, CORE_IO), 3000)
    b.out(24, LOOP, nr=EPOLL_WAIT).wake(46, LOOP, CORE).into(46.5, LOOP)
    message(b, (46, CORE), (47, LOOP), 4000)
    return b.send(50, LOOP).out(52, LOOP, nr=EPOLL_WAIT)


def test_the_path_goes_through_front_end_core_and_model() -> None:
    path, _ = engine().walk(request(0, 50))
    assert shape(path) == [
        (0, 20, LOOP, RUNNING),
        (20, 20.1, SENDER, WAKEUP),
        (20.1, 20.5, SENDER, RUNNING),
        (20.5, 20.6, CORE_IO, WAKEUP),
        (20.6, 20.8, CORE_IO, RUNNING),
        (20.8, 20.9, CORE_INPUT, WAKEUP),
        (20.9, 22, CORE_INPUT, RUNNING),
        (22, 25, CORE, RUNNING),
        (25, 25.1, MODEL_IO, WAKEUP),
        (25.1, 25.4, MODEL_IO, RUNNING),
        (25.4, 45, MODEL, RUNNING),
        (45, 45.1, CORE_IO, WAKEUP),
        (45.1, 45.3, CORE_IO, RUNNING),
        (45.3, 46, CORE, RUNNING),
        (46, 46.5, LOOP, WAKEUP),
        (46.5, 50, LOOP, RUNNING),
    ]


def test_what_a_spinning_thread_did_after_its_message_is_inferred() -> None:
    path, _ = engine().walk(request(0, 50))
    assert {(s.tid, s.inferred) for s in path.segments if s.tid in (CORE, MODEL)} == {
        (CORE, False),  # up to the hand-over: nothing was looked for
        (CORE, True),
        (MODEL, True),
    }


def test_a_thread_that_never_yields_is_not_taken_to_poll() -> None:
    path, _ = engine(core_spins=False).walk(request(0, 50))
    assert MODEL not in {s.tid for s in path.segments}
    assert (22, 46, CORE, RUNNING) in shape(path)


def test_a_model_that_is_starved_while_the_core_spins_is_on_the_path() -> None:
    b = engine()
    b.out(28, MODEL, 0, next_tid=HOG, flags=0, nr=-2, cpu=2).into(41, MODEL, HOG, cpu=2)
    path, _ = b.walk(request(0, 50))
    starved = [s for s in path.segments if s.tid == MODEL and s.state == RUNNABLE]
    assert [(s.start_ns, s.end_ns) for s in starved] == [(ns(28), ns(41))]
    assert starved[0].rival is not None and starved[0].rival.tid == HOG
    assert not starved[0].inferred  # it had its message, and no CPU


def test_a_throttled_model_is_on_the_path() -> None:
    b = engine()
    b.out(28, MODEL, 0, flags=2, nr=-2, cpu=2).into(41, MODEL, cpu=2, throttled_ms=13)
    path, _ = b.walk(request(0, 50))
    assert (28, 41, MODEL, THROTTLED) in shape(path)


def test_another_requests_message_during_a_step_does_not_divert_the_path() -> None:
    b = engine()
    message(b, (30.5, SENDER), (30.7, CORE_IO), 1000)
    b.wake(30.5, CORE_IO, SENDER).into(30.6, CORE_IO).out(30.9, CORE_IO, nr=EPOLL_WAIT)
    path, _ = b.walk(request(0, 50))
    assert (25.4, 45, MODEL, RUNNING) in shape(path)


def test_hand_over_is_where_the_other_process_can_see_the_request() -> None:
    assert handover(engine().timelines(0, 0), request(0, 50)) == (ns(22), CORE_INPUT, CORE)


def test_no_hand_over_to_a_process_of_another_service() -> None:
    b = engine().known(ProcessFact(CORE, "core", service="other"))
    assert handover(b.timelines(0, 0), request(0, 50)) is None


def test_no_hand_over_after_the_first_byte() -> None:
    assert handover(engine().timelines(0, 0), request(0, 50, first_ms=15)) is None


def test_inboxes_know_who_took_a_message_in_and_when() -> None:
    inboxes = engine().timelines(0, 0).shared(Inboxes)
    found = inboxes.latest(CORE, CORE, ns(0), ns(46))
    assert found is not None and (found.write_ns, found.tid, found.tgid) == (ns(45.3), CORE_IO, CORE)
    found = inboxes.latest(CORE, CORE, ns(0), ns(45))
    assert found is not None and (found.write_ns, found.tid) == (ns(22), CORE_INPUT)
    assert inboxes.latest(CORE, CORE, ns(22), ns(45)) is None
    assert inboxes.latest(CORE_INPUT, CORE, ns(0), ns(45)) is None  # its own message is no news to it


@given(st.sets(st.integers(0, len(engine().rows) - 1)), lossy_events(most=20))
@settings(max_examples=80, deadline=None)
def test_tiles_whatever_is_lost(lost: set[int], noise: EventBuilder) -> None:
    b = engine()
    b.rows = [row for i, row in enumerate(b.rows) if i not in lost] + noise.rows
    check(walk(b.timelines(0, 0), request(0, 50)))


@pytest.mark.parametrize("lost", ["sock_recv", "edge_read", "sock_send", "sched_wake"])
def test_tiles_without_a_kind_of_event(lost: str) -> None:
    b = engine()
    kind = b.schema.kind(lost)
    b.rows = [row for row in b.rows if int.from_bytes(row[1][16:18], "little") != kind]
    check(walk(b.timelines(0, 0), request(0, 50)))
