"""Requests: from heads and response marks to identity, status, end and outcome."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan import requests
from whyspan.facts import Facts
from whyspan.model import Batch, ProcessFact, Request
from whyspan.requests import RequestTable

from tests.unit.timeline import COOKIE, HOG, LOOP, SERVER, WORKER, ns
from tests.unit.wire import (
    SCHEMA,
    TCP_CLOSE,
    TCP_CLOSE_WAIT,
    TCP_FIN_WAIT1,
    TCP_FIN_WAIT2,
    TCP_LAST_ACK,
    Wire,
)

OTHER = 300
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-00"


def feed(table: RequestTable, *batches: Batch) -> list[Request]:
    facts = Facts()
    out = []
    for batch in batches:
        facts.update(batch, SCHEMA)
        out += table.feed(batch, facts)
    return out


def table(instance: str = "i") -> RequestTable:
    return RequestTable(SCHEMA, instance)


def test_a_request_from_head_to_last_byte() -> None:
    w = Wire().ask(
        10,
        first_ns=ns(5),
        recv_ns=ns(8),
        content_length=99,
        traceparent=PARENT,
        headers={"x-request-id": "r", "x-tenant-id": "t"},
    )
    w.status(20).done(30, first_ms=25, tid=WORKER, chunks=3, size=1234)
    t = table()
    (r,) = feed(t, *w.batches(50))
    assert r == Request(
        trace_id="ab" * 16,
        trace_id_source="traceparent",
        parent_span_id="cd" * 8,
        sampled=False,
        request_id="r",
        tenant="t",
        service="svc",
        tgid=SERVER,
        start_tid=LOOP,
        end_tid=WORKER,
        method="POST",
        route="/v1/completions",
        status=200,
        outcome="ok",
        ended_by="server",
        start_ns=ns(5),
        recv_ns=ns(8),
        head_ns=ns(20),
        first_ns=ns(25),
        end_ns=ns(30),
        chunks=3,
        request_bytes=99,
        response_bytes=1234,
        cookie=COOKIE,
        seq=0,
        client_port=50000,
        server_port=8000,
    )
    assert t.open_requests() == []


def test_keep_alive_gives_each_its_own() -> None:
    w = Wire()
    for seq in range(3):
        w.ask(10 * seq, seq=seq, route=f"/{seq}").status(10 * seq + 4, seq=seq).done(10 * seq + 5, seq=seq)
    w.state(100)  # closed while idle: nobody's concern
    found = feed(table(), *w.batches(12, 200))
    assert [(r.route, r.outcome, r.end_ns) for r in found] == [
        (f"/{s}", "ok", ns(10 * s + 5)) for s in range(3)
    ]
    assert len({r.trace_id for r in found}) == 3


def test_pipelined_requests_end_in_the_order_of_the_responses() -> None:
    w = Wire()
    for seq in range(3):
        w.ask(seq, seq=seq)
    for seq in range(3):
        w.status(10 + seq, seq=seq, status=200 + seq).done(10.5 + seq, seq=seq, status=200 + seq)
    t = table()
    first, second = w.batches(11, 20)
    assert [r.seq for r in feed(t, first)] == [0]
    assert [r.seq for r in t.open_requests()] == [1, 2]
    assert [(r.seq, r.status) for r in feed(t, second)] == [(1, 201), (2, 202)]


def test_pipelining_on_two_connections_does_not_mix() -> None:
    w = Wire().ask(0, cookie=1).ask(1, cookie=2).status(5, 404, cookie=2).done(6, 404, cookie=2)
    w.status(7, 201, cookie=1).done(8, 201, cookie=1)
    assert [(r.cookie, r.status) for r in feed(table(), *w.batches(9))] == [(2, 404), (1, 201)]


def test_an_interim_response_ends_nothing_and_the_final_one_counts() -> None:
    # The kernel does not report 1xx; were one reported, the final head would still replace it.
    w = Wire().ask(0).status(5, 100).status(20, 200)
    t = table()
    assert feed(t, *w.batches(30)) == []
    (r,) = t.open_requests()
    assert (r.status, r.head_ns, r.outcome) == (200, ns(20), "open")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "ok"),
        (399, "ok"),
        (400, "error"),
        (404, "error"),
        (429, "error"),
        (500, "error"),
        (503, "error"),
    ],
)
def test_outcome_by_status(status: int, outcome: str) -> None:
    (r,) = feed(table(), *Wire().ask(0).done(5, status).batches(9))
    assert (r.status, r.outcome) == (status, outcome)


def test_a_response_ended_by_close_is_whole() -> None:
    w = Wire().ask(0).status(5).done(9, flags=1).state(9.1)
    (r,) = feed(table(), *w.batches(20))
    assert (r.outcome, r.end_ns) == ("ok", ns(9))


@pytest.mark.parametrize("aux", [0, 1])
def test_reset_or_closed_before_the_last_byte(aux: int) -> None:
    w = Wire().ask(0).ask(1, seq=1).status(5).state(20, new_state=7 if aux == 0 else 0, aux=aux)
    found = feed(table(), *w.batches(30))
    assert [(r.seq, r.outcome, r.end_ns, r.status) for r in found] == [
        (0, "reset", ns(20), 200),
        (1, "reset", ns(20), 0),
    ]
    assert [r.end_tid for r in found] == [LOOP, LOOP]


def test_no_request_ends_before_it_began() -> None:
    w = Wire().ask(5, first_ns=ns(20)).state(10)
    (r,) = feed(table(), *w.batches(30))
    assert (r.start_ns, r.end_ns, r.outcome) == (ns(20), ns(20), "reset")


def test_a_half_close_by_the_client_ends_nothing() -> None:
    t = table()
    w = Wire().ask(0).state(5, TCP_CLOSE_WAIT).state(6, cookie=COOKIE + 1).state(7, aux=1, cookie=COOKIE + 1)
    assert feed(t, *w.batches(9)) == []
    assert len(t.open_requests()) == 1


def test_a_process_that_dies_takes_its_requests_with_it() -> None:
    w = Wire().ask(0, cookie=1).ask(1, cookie=2).ask(2, cookie=3, tgid=OTHER, tid=OTHER)
    w.add("sched_exit", 10, WORKER, aux=0)  # one thread: not the process
    w.add("sched_exit", 20, LOOP, aux=1, exit_code=9)
    t = table()
    assert feed(t, *w.batches(30)) == []  # their connections may still tell how far they were
    assert [r.cookie for r in t.open_requests()] == [3]
    found = feed(t, *Wire().batches(1020, facts=False))
    assert [(r.cookie, r.outcome, r.ended_by, r.exit_code, r.end_ns) for r in found] == [
        (1, "killed", "process_exit", 9, ns(20)),
        (2, "killed", "process_exit", 9, ns(20)),
    ]


def test_a_response_whose_framing_was_lost() -> None:
    w = Wire().ask(0).add("http_head_lost", 10, LOOP, aux=2, cookie=COOKIE)
    (r,) = feed(table(), *w.batches(20))
    assert (r.outcome, r.end_ns) == ("lost", ns(10))
    # A lost request head says nothing of the requests before it.
    w = Wire().ask(0).add("http_head_lost", 10, LOOP, aux=1, cookie=COOKIE).done(12)
    assert [r.outcome for r in feed(table(), *w.batches(20))] == ["ok"]


def test_an_end_without_a_head_is_nobodys() -> None:
    assert feed(table(), *Wire().status(1).done(2).state(3).batches(9)) == []


def test_marks_that_come_in_a_later_batch_than_the_head() -> None:
    t = table()
    w = Wire().ask(0).status(300).done(600)
    assert [len(feed(t, b)) for b in w.batches(250, 500, 750)] == [0, 0, 1]


def test_head_and_end_at_the_same_instant() -> None:
    (r,) = feed(table(), *Wire().ask(5).status(5).done(5).batches(9))
    assert (r.start_ns, r.end_ns, r.outcome) == (ns(5), ns(5), "ok")


def test_generated_ids_follow_from_instance_connection_number_and_time() -> None:
    def ids(instance: str, **fields: int) -> str:
        (r,) = feed(table(instance), *Wire().ask(0, **fields).done(5, **fields).batches(9))
        assert r.trace_id_source == "generated"
        assert r.sampled
        assert len(r.trace_id) == 32 and int(r.trace_id, 16) > 0
        return r.trace_id

    # sha256 of "i:77:0:1000000000": a recording must give the same ids to every version.
    assert ids("i") == ids("i") == "e526f3bc65502d46b3b25231ab02f1d8"
    assert len({ids("i"), ids("j"), ids("i", seq=1), ids("i", cookie=5)}) == 4


def test_a_bad_traceparent_gives_a_generated_id() -> None:
    (r,) = feed(table(), *Wire().ask(0, traceparent="00-zz").done(1).batches(9))
    assert (r.trace_id_source, r.parent_span_id) == ("generated", "")


def test_the_service_is_the_process_name_when_nothing_better_is_known() -> None:
    w = Wire().ask(0, tgid=OTHER, tid=OTHER).done(1).known(ProcessFact(OTHER, "odd"))
    assert isinstance(w, Wire)
    assert [r.service for r in feed(table(), *w.batches(9))] == ["odd"]


def test_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MAX_OPEN", 10)
    t = table()
    w = Wire()
    for cookie in range(25):
        w.ask(cookie, cookie=cookie)
    feed(t, *w.batches(30))
    assert [r.cookie for r in t.open_requests()] == list(range(15, 25))
    assert t.forgotten == 15
    w = Wire().done(40, cookie=3).done(41, cookie=20)
    assert [r.cookie for r in feed(t, *w.batches(50))] == [20]


def test_a_head_seen_twice_is_counted_and_the_later_one_holds() -> None:
    t = table()
    found = feed(t, *Wire().ask(0, route="/a").ask(5, route="/b").done(9).batches(10))
    assert [(r.route, r.start_ns) for r in found] == [("/b", ns(5))]
    assert t.forgotten == 1
    assert feed(t, *Wire().state(20).batches(30)) == []


@given(st.integers(0, 2**32))
def test_any_order_and_loss_of_marks_keeps_the_books(seed: int) -> None:
    random_ = random.Random(seed)
    t, w, asked = table(), Wire(), set()
    for _ in range(40):
        ms, cookie, seq = random_.randrange(100), random_.randrange(3), random_.randrange(4)
        what = random_.randrange(6)
        if what <= 1:
            w.ask(ms, cookie=cookie, seq=seq)
            asked.add((ns(ms), cookie, seq))
        elif what == 2:
            w.status(ms, cookie=cookie, seq=seq)
        elif what == 3:
            w.done(ms, cookie=cookie, seq=seq)
        elif what == 4:
            w.state(ms, cookie=cookie, aux=random_.randrange(2))
        else:
            w.add("sched_exit", ms, LOOP, aux=random_.randrange(2))
    found = feed(t, *w.batches(30, 60, 100)) + t.flush(Facts())
    assert len(found) + len(t.open_requests()) + t.forgotten == len(w.heads)
    assert len({id(r) for r in found}) == len(found)
    for r in found:
        assert (r.start_ns, r.cookie, r.seq) in asked
        assert r.end_ns >= r.start_ns
        assert r.outcome != "open"


def test_what_is_newer_than_the_drain_waits_for_what_may_be_older() -> None:
    # The exit came on a ring that was drained before the one that tells of the connection's end.
    w = Wire().ask(0).state(20, TCP_FIN_WAIT1)
    early = w.batches(30)[0]
    early.now_ns = ns(10)
    t = table()
    assert feed(t, early) == []
    (r,) = feed(t, *Wire().exit(19).batches(50))
    assert (r.outcome, r.ended_by, r.end_ns) == ("killed", "process_exit", ns(19))


def test_flush_ends_what_still_waits() -> None:
    batch = Wire().ask(0).ask(1, cookie=2, tgid=OTHER, tid=OTHER).done(20).exit(21, OTHER).batches(30)[0]
    batch.now_ns = ns(10)
    t = table()
    assert feed(t, batch) == []
    found = t.flush(Facts())
    assert [(r.outcome, r.end_ns) for r in found] == [("ok", ns(20)), ("killed", ns(21))]
    assert t.flush(Facts()) == []


def test_how_far_a_response_was_when_it_was_cut_off() -> None:
    w = Wire().ask(0).status(5).done(20, first_ms=6, chunks=14, size=700, tid=WORKER, flags=2)
    w.state(20, aux=1)
    (r,) = feed(table(), *w.batches(30))
    assert (r.outcome, r.ended_by, r.status, r.chunks, r.response_bytes) == (
        "reset",
        "client_reset",
        200,
        14,
        700,
    )
    assert (r.first_ns, r.end_ns, r.end_tid) == (ns(6), ns(20), LOOP)  # whoever ran then is not the writer


def test_how_far_a_response_was_when_its_process_was_killed() -> None:
    w = Wire().ask(0).status(5).exit(20)
    w.done(20.1, first_ms=6, chunks=3, flags=2, tid=0).state(20.1, TCP_FIN_WAIT1).state(20.2, old_state=4)
    t = table()
    (r,) = feed(t, *w.batches(30))
    assert (r.outcome, r.ended_by, r.exit_code, r.chunks, r.end_ns) == (
        "killed",
        "process_exit",
        9,
        3,
        ns(20),
    )
    # One that only the connection's end would have ended was not whole either.
    w = Wire().ask(100, seq=1).status(105, seq=1).exit(120)
    w.done(120.1, seq=1, chunks=5, flags=1).state(120.1, TCP_FIN_WAIT1)
    (r,) = feed(t, *w.batches(130, facts=False))
    assert (r.outcome, r.chunks, r.end_ns) == ("killed", 5, ns(120))


def test_a_response_that_another_process_finishes_is_whole() -> None:
    w = Wire().ask(0).exit(20).done(30, tid=WORKER)
    (r,) = feed(table(), *w.batches(50))
    assert (r.outcome, r.ended_by, r.exit_code, r.end_ns) == ("ok", "server", 0, ns(30))


def test_when_the_client_left_is_kept() -> None:
    w = Wire().ask(0).state(5, TCP_CLOSE_WAIT).state(9, TCP_LAST_ACK, old_state=TCP_CLOSE_WAIT)
    (r,) = feed(table(), *w.batches(20))
    assert (r.outcome, r.ended_by, r.left_ns, r.end_ns) == ("reset", "client_close", ns(5), ns(9))
    # It only closed its side: the answer is whole.
    w = Wire().ask(0).state(5, TCP_CLOSE_WAIT).done(9).state(9, TCP_LAST_ACK, old_state=TCP_CLOSE_WAIT)
    (r,) = feed(table(), *w.batches(20))
    assert (r.outcome, r.ended_by, r.left_ns) == ("ok", "server", ns(5))


def test_the_servers_close_ends_its_requests_at_once() -> None:
    # The client may keep its side open for a minute more.
    w = Wire().ask(0).ask(1, seq=1).state(9, TCP_FIN_WAIT1).state(60_000, TCP_CLOSE, old_state=TCP_FIN_WAIT2)
    found = feed(table(), *w.batches(100))
    assert [(r.seq, r.ended_by, r.end_ns) for r in found] == [
        (0, "server_close", ns(9)),
        (1, "server_close", ns(9)),
    ]


@pytest.mark.parametrize(("fields", "state"), [({}, "whole"), ({"malformed": True}, "malformed")])
def test_the_state_of_the_head(fields: dict[str, bool], state: str) -> None:
    (r,) = feed(table(), *Wire().ask(0, **fields).done(5, 400).batches(9))
    assert (r.head, r.outcome) == (state, "error")


def test_a_head_that_was_cut_off_with_its_connection() -> None:
    # The kernel sends the head's end and the connection's end with one time.
    w = Wire().ask(7, first_ns=ns(2), recv_ns=ns(3), malformed=True, cut=True).state(7, TCP_CLOSE, aux=1)
    (r,) = feed(table(), *w.batches(9))
    assert (r.head, r.start_ns, r.recv_ns, r.end_ns, r.ended_by) == (
        "cut",
        ns(2),
        ns(3),
        ns(7),
        "client_reset",
    )


def test_a_request_that_nobody_read_belongs_to_who_reads_that_port() -> None:
    w = Wire().ask(0).done(1)
    w.unread(50, 20, cookie=9, tid=HOG).state(50, cookie=9, error=104)  # the hog had the CPU
    ok, r = feed(table(), *w.batches(90))
    assert ok.outcome == "ok"
    assert (r.head, r.method, r.route, r.service, r.tgid) == ("unread", "", "", "svc", SERVER)
    assert (r.start_ns, r.end_ns, r.outcome, r.ended_by) == (ns(20), ns(50), "reset", "client_reset")


def test_a_request_that_nobody_read_before_its_process_was_killed() -> None:
    w = Wire().ask(0).done(1).exit(50).unread(50.1, 20, cookie=9, tid=LOOP).state(50.1, cookie=9)
    _, r = feed(table(), *w.batches(90))
    assert (r.head, r.outcome, r.ended_by, r.exit_code) == ("unread", "killed", "process_exit", 9)
    assert (r.start_ns, r.end_ns) == (ns(20), ns(50))


def test_a_number_used_again_by_another_process_is_not_taken_for_the_dead_one() -> None:
    t = table()
    feed(t, *Wire().exit(50).batches(90))
    w = Wire().ask(5000).done(5001).ask(5002, cookie=3).state(5003, TCP_FIN_WAIT1, cookie=3)
    assert [r.outcome for r in feed(t, *w.batches(9000, facts=False))] == ["ok", "reset"]


def test_requests_of_a_process_that_is_no_longer_watched_are_forgotten() -> None:
    t = table()
    w = Wire().ask(10, cookie=1).ask(11, cookie=2, tgid=OTHER)
    assert feed(t, *w.batches(50)) == []
    t.drop([OTHER])
    assert [r.cookie for r in t.open_requests()] == [1]
    assert t.forgotten == 1
    t.drop([OTHER])
    assert t.forgotten == 1
