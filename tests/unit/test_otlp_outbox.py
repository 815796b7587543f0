"""The outbox: nothing lost, in order, counted exactly, whatever the receiver and the disk do."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from whyspan.config import Otlp
from whyspan_exporters.otlp.outbox import MAX_HELD_BYTES, Flow, Outbox
from whyspan_exporters.otlp.sender import PACE, Pace
from whyspan_exporters.otlp.settings import Target, resolve
from whyspan_exporters.otlp.spool import Spool
from whyspan_exporters.otlp.spool_file import MAX_PAYLOAD_BYTES
from whyspan_exporters.otlp.transport import Answer, Kind

from tests.unit.receivers import wait_until

MIB = 1 << 20
FAST = PACE._replace(linger_s=0.0, first_s=0.001, last_s=0.002)
TAKEN, LATER = Answer(Kind.TAKEN), Answer(Kind.LATER, "away")
REFUSED, TOO_BIG = Answer(Kind.REFUSED, "no"), Answer(Kind.REFUSED, "too big", smaller=True)

found = resolve(Otlp(endpoint="http://127.0.0.1:9"), {})
assert found.traces is not None
assert found.metrics is not None
TARGETS: list[Target] = [found.traces, found.metrics]


class Peer:
    """A receiver behind a transport: answers what `answer` says, keeps what was sent and what was taken."""

    def __init__(self, answer: Callable[[bytes], Answer] = lambda _: TAKEN) -> None:
        self.answer = answer
        self.sent: list[bytes] = []
        self.taken: list[bytes] = []
        self.closed = threading.Event()

    def send(self, payload: bytes) -> Answer:
        self.sent.append(payload)
        answer = self.answer(payload)
        if answer.kind is Kind.TAKEN:
            self.taken.append(payload)
        return answer

    def close(self) -> None:
        self.closed.set()


class Peers(dict[str, Peer]):
    """One for each signal, whenever a transport is made for it."""

    def make(self, target: Target) -> Peer:
        return self.setdefault(target.signal, Peer())


MakeOutbox = Callable[..., Outbox]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.db"


@pytest.fixture
def make_outbox(path: Path) -> Iterator[MakeOutbox]:
    made: list[Outbox] = []

    def make(peers: Peers, *, mib: int = 16, pace: Pace = FAST, start: bool = True) -> Outbox:
        made.append(Outbox(TARGETS, path, mib * MIB, make=peers.make, pace=pace))
        if start:
            made[-1].start()
        return made[-1]

    yield make
    for outbox in made:
        outbox.close(0.0)


def flow(outbox: Outbox, signal: str = "traces") -> Flow:
    flow = outbox.figures().flows[signal]
    assert flow.offered == flow.sent + flow.failed + flow.dropped + flow.queued
    return flow


def sent(outbox: Outbox) -> int:
    return flow(outbox).sent


def test_in_order_and_at_once(make_outbox: MakeOutbox) -> None:
    peers = Peers(traces=Peer(), metrics=Peer())
    outbox = make_outbox(peers)
    for n in range(100):
        outbox.put("traces", b"%03d" % n, 5)
        outbox.put("metrics", b"m", 7)
        outbox.put("logs", b"nobody asked for these", 7)
    wait_until(lambda: (flow(outbox).sent, flow(outbox, "metrics").sent) == (500, 700))
    assert b"".join(peers["traces"].taken) == b"".join(b"%03d" % n for n in range(100))
    assert outbox.figures().batches == 0
    assert set(outbox.figures().flows) == {"traces", "metrics"}


def test_nothing_is_lost_while_the_receiver_is_away(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peers = Peers(traces=Peer(lambda _: LATER))
    outbox = make_outbox(peers)
    for n in range(100):
        outbox.put("traces", b"%03d" % n, 5)
    wait_until(lambda: len(peers["traces"].sent) > 5)
    assert flow(outbox) == Flow(500, 0, 0, 0, 500, 100)
    peers["traces"].answer = lambda _: TAKEN
    wait_until(lambda: sent(outbox) == 500)
    assert b"".join(peers["traces"].taken) == b"".join(b"%03d" % n for n in range(100))
    said = [r.getMessage() for r in caplog.records]
    assert [m for m in said if "reach" in m] == [
        "otlp: traces do not reach http://127.0.0.1:9: away",
        "otlp: traces reach http://127.0.0.1:9 again",
    ]


def test_a_restart_goes_on_where_it_was(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(Peers(traces=Peer(lambda _: LATER)))
    for n in range(10):
        outbox.put("traces", b"%03d" % n, 5)
    outbox.close(0.1)
    peers = Peers(traces=Peer())
    again = make_outbox(peers)
    wait_until(lambda: sent(again) == 50)
    assert b"".join(peers["traces"].taken) == b"".join(b"%03d" % n for n in range(10))
    assert flow(again).offered == 50


def test_what_is_refused_is_counted_and_not_sent_again(make_outbox: MakeOutbox) -> None:
    answers = deque([REFUSED, TAKEN, Answer(Kind.TAKEN, "some", 2), Answer(Kind.TAKEN, "lies", 1000)])
    peers = Peers(traces=Peer(lambda _: answers.popleft()))
    outbox = make_outbox(peers, pace=FAST._replace(max_items=1))
    for n in range(4):
        outbox.put("traces", b"%d" % n, 5)
    wait_until(lambda: flow(outbox).queued == 0)
    assert peers["traces"].sent == [b"0", b"1", b"2", b"3"]
    assert flow(outbox) == Flow(20, 5 + 3, 5 + 2 + 5, 0, 0, 0)
    assert "1000 rejected: lies" in outbox.status()["traces"]["last_error"]


def test_one_bad_batch_does_not_take_the_others_with_it(make_outbox: MakeOutbox) -> None:
    peers = Peers(traces=Peer(lambda payload: TOO_BIG if b"bad" in payload else TAKEN))
    outbox = make_outbox(peers, start=False)
    for name in (b"a", b"b", b"bad", b"c"):
        outbox.put("traces", name, 5)
    outbox.start()
    outbox.put("traces", b"d", 5)
    wait_until(lambda: flow(outbox).queued == 0)
    assert b"".join(peers["traces"].taken) == b"abcd"
    assert flow(outbox) == Flow(25, 20, 5, 0, 0, 0)


def test_too_many_for_one_request_go_in_smaller_ones(make_outbox: MakeOutbox) -> None:
    peers = Peers(traces=Peer(lambda payload: TOO_BIG if len(payload) > 1 else TAKEN))
    outbox = make_outbox(peers, start=False)
    for _ in range(5):
        outbox.put("traces", b"x", 5)
    outbox.start()
    outbox.put("traces", b"x", 5)
    wait_until(lambda: flow(outbox).queued == 0)
    assert flow(outbox) == Flow(30, 30, 0, 0, 0, 0)


def test_what_the_receiver_asks_for_is_waited(make_outbox: MakeOutbox) -> None:
    times: list[float] = []

    def answer(_: bytes) -> Answer:
        times.append(time.monotonic())
        return TAKEN if len(times) > 1 else Answer(Kind.LATER, "busy", after_s=0.3)

    outbox = make_outbox(Peers(traces=Peer(answer)))
    outbox.put("traces", b"x", 5)
    wait_until(lambda: sent(outbox) == 5)
    assert times[1] - times[0] >= 0.3


def test_a_transport_that_cannot_be_made_is_a_state(make_outbox: MakeOutbox, path: Path) -> None:
    def make(_: Target) -> Peer:
        raise OSError("no such certificate")

    outbox = Outbox(TARGETS, path, 16 * MIB, make=make, pace=FAST)
    outbox.start()
    outbox.put("traces", b"x", 5)
    wait_until(lambda: outbox.status()["traces"]["failing"])
    assert "no such certificate" in outbox.status()["traces"]["last_error"]
    assert flow(outbox).queued == 5
    outbox.close(0.2)


def test_losses_at_the_bound_are_counted_exactly(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers(traces=Peer(lambda _: LATER))
    outbox = make_outbox(peers, pace=FAST._replace(first_s=30, last_s=60))
    for n in range(200):
        outbox.put("traces", b"%06d" % n * 30_000, 3)
    state = flow(outbox)
    assert state.dropped > 100
    assert outbox.figures().size_bytes <= 16 * MIB
    assert [m for r in caplog.records if "is full" in (m := r.getMessage())] == [
        "otlp: the spool of 16 MiB is full: the oldest go"
    ]
    outbox.close(0.1)
    peers = Peers(traces=Peer())
    again = make_outbox(peers)
    wait_until(lambda: flow(again).queued == 0)
    got = b"".join(peers["traces"].taken)
    numbers = [int(got[at : at + 6]) for at in range(0, len(got), 180_000)]
    assert numbers == list(range(200 - len(numbers), 200))
    assert flow(again) == Flow(600, 3 * len(numbers), 0, 600 - 3 * len(numbers), 0, 0)


def test_too_big_is_dropped_and_counted(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(Peers())
    outbox.put("traces", b"x" * (MAX_PAYLOAD_BYTES + 1), 5)
    assert flow(outbox) == Flow(5, 0, 0, 5, 0, 0)
    outbox.drop("traces", 2, "no form for it")
    assert flow(outbox) == Flow(7, 0, 0, 7, 0, 0)


class FullDisk:
    """Makes commits of spools fail while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        commit = Spool._commit

        def failing(spool: Spool, *args: Any) -> None:
            if self.on:
                exc = sqlite3.OperationalError("database or disk is full")
                exc.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise exc
            commit(spool, *args)

        monkeypatch.setattr(Spool, "_commit", failing)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_a_full_disk_is_a_state_and_all_is_sent_from_memory(
    make_outbox: MakeOutbox, full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peers = Peers(traces=Peer())
    outbox = make_outbox(peers)
    outbox.put("traces", b"0", 5)
    wait_until(lambda: sent(outbox) == 5)
    full_disk.on = True
    for n in range(1, 10):
        outbox.put("traces", b"%d" % n, 5)
    assert outbox.figures().state == "disk full"
    wait_until(lambda: sent(outbox) == 50)
    assert b"".join(peers["traces"].taken) == b"0123456789"
    assert outbox.flush() == ""  # all of it is with the receiver
    full_disk.on = False
    outbox.put("traces", b"a", 5)
    assert outbox.figures().state == ""
    wait_until(lambda: sent(outbox) == 55)
    said = [r.getMessage() for r in caplog.records if "spool" in r.getMessage()]
    assert said == [
        "otlp: the spool cannot be written: disk full; what comes now waits in memory",
        "otlp: the spool can be written again",
    ]


def test_nothing_is_acknowledged_that_is_in_memory_only(make_outbox: MakeOutbox, full_disk: FullDisk) -> None:
    peers = Peers(traces=Peer(lambda _: LATER))
    outbox = make_outbox(peers)
    outbox.put("traces", b"0", 5)
    assert outbox.flush() == ""
    full_disk.on = True
    outbox.put("traces", b"1", 5)
    assert outbox.flush() == "disk full"
    outbox.put("metrics", b"m", 5)
    assert flow(outbox) == Flow(10, 0, 0, 0, 10, 2)
    full_disk.on = False
    wait_until(lambda: outbox.flush() == "")  # when nothing of it is on its way
    peers["traces"].answer = lambda _: TAKEN
    wait_until(lambda: sent(outbox) == 10)
    assert b"".join(peers["traces"].taken) == b"01"


def test_memory_is_bounded_and_counted(make_outbox: MakeOutbox, full_disk: FullDisk) -> None:
    outbox = make_outbox(Peers(traces=Peer(lambda _: LATER)))
    full_disk.on = True
    for _ in range(30):
        outbox.put("traces", b"x" * MIB, 5)
    state = flow(outbox)
    assert (state.offered, state.sent, state.failed) == (150, 0, 0)
    assert state.batches in (MAX_HELD_BYTES // MIB, MAX_HELD_BYTES // MIB + 1)  # one may be on its way
    full_disk.on = False
    outbox.close(0.1)
    again = make_outbox(Peers(), start=False)
    assert flow(again) == state


def test_a_spool_that_cannot_be_opened_is_a_state(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    peers = Peers(traces=Peer())
    outbox = Outbox(TARGETS, tmp_path / "file" / "spool.db", 16 * MIB, make=peers.make, pace=FAST)
    assert "exists" in outbox.figures().state or "directory" in outbox.figures().state
    outbox.start()
    outbox.put("traces", b"x", 5)
    wait_until(lambda: sent(outbox) == 5)
    (tmp_path / "file").unlink()
    outbox.put("traces", b"y", 5)
    assert outbox.figures().state == ""
    wait_until(lambda: sent(outbox) == 10)
    outbox.close(0.2)


def test_the_end_does_not_wait_for_a_receiver_that_is_silent(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peer = Peer()

    def silent(_: bytes) -> Answer:
        peer.closed.wait(60)
        return LATER

    peer.answer = silent
    outbox = make_outbox(Peers(traces=peer))
    outbox.put("traces", b"x", 5)
    wait_until(lambda: peer.sent)
    outbox.close(0.05)
    assert peer.closed.is_set()
    assert flow(outbox).queued == 5
    assert caplog.records[-1].getMessage() == "otlp: kept for the next start: 5 items of traces"


def test_the_end_sends_what_it_can(make_outbox: MakeOutbox) -> None:
    peers = Peers(traces=Peer())
    outbox = make_outbox(peers, pace=FAST._replace(linger_s=3600, max_items=1))
    for n in range(5):
        outbox.put("traces", b"%d" % n, 5)
    outbox.close(20)
    assert peers["traces"].taken == [b"0", b"1", b"2", b"3", b"4"]


def test_back_off_grows_at_random() -> None:
    from tenacity import Future, RetryCallState, Retrying
    from whyspan_exporters.otlp.delivery import Delivery
    from whyspan_exporters.otlp.sender import Sender

    class Nothing:
        def take(self, *_: object) -> None:
            return None

    source: Any = Nothing()
    sender = Sender(source, Delivery(TARGETS[0]), Peer, Pace(first_s=1, last_s=30))
    waits: dict[int, list[float]] = {}
    for attempt in (1, 3, 9):
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = attempt
        state.outcome = Future.construct(attempt, LATER, False)
        waits[attempt] = [sender._wait_s(state) for _ in range(300)]
    sender.begin_close(0)
    sender.end_close()
    for attempt, most in ((1, 1), (3, 4), (9, 30)):
        assert max(waits[attempt]) <= most
        assert max(waits[attempt]) > most / 2 > min(waits[attempt])
        assert len(set(waits[attempt])) > 200
    assert (PACE.first_s, PACE.last_s) == (1, 30)
