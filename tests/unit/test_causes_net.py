"""Rules on the network: loss, Nagle, holes, connects, DNS, the listen queue; claims, refusals and culprits."""

from __future__ import annotations

from typing import Any

import pytest
from whyspan.causes import Context, rule_out
from whyspan.causes.classify import Classified
from whyspan.critical_path import NET_RX

from tests.unit.timeline import (
    COOKIE,
    EPOLL_WAIT,
    HOG,
    LOOP,
    MS,
    NANOSLEEP,
    SENDTO,
    WORKER,
    EventBuilder,
    ms_of,
    ns,
    request,
)

RECV, CONNECT, POLL = 45, 42, 7
UP, OTHER = 41, 42  # cookies
PORT, NEAR = 9000, 50_001  # the peer's, ours
TIMER, SOFTIRQ = 1, 2
TIMEOUT, FAST, PROBE, SYN = 1, 2, 3, 4
SOCKET = 4


def ports(**more: Any) -> dict[str, Any]:
    return {"lport": NEAR, "rport": PORT, **more}


def checks(found: Classified, ctx: Context) -> dict[str, str]:
    return {r.cause: r.check for r in rule_out(found, ctx)}


def calling(until: float = 60, cookie: int = UP, *, nr: int = RECV, **wake: Any) -> EventBuilder:
    """LOOP serves a request 0-(until+10); from 11 to *until* it waits for the answer of a peer, asked at 10."""
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(10, LOOP, cookie, **ports(offset=1000, bytes=50))
    b.out(11, LOOP, nr=nr, arg0=7).wake(until, LOOP, **{"context": SOFTIRQ, "vec": NET_RX, **wake})
    b.into(until, LOOP).recv(until + 0.1, LOOP, cookie, **ports())
    return b.send(until + 10, LOOP).out(until + 20, LOOP, nr=EPOLL_WAIT)


def again(b: EventBuilder, ms: float, cookie: int = UP, why: int = TIMEOUT, **payload: Any) -> EventBuilder:
    base = {"cookie": cookie, "seq": 1000, "rto_us": 200_000, "srtt_us": 100, "total": 1}
    return b.add("tcp_retransmit", ms, HOG, aux=why, **ports(**{**base, **payload}))


# net.loss


def test_a_lost_question_is_charged_from_its_send_to_when_it_was_sent_again() -> None:
    found, _ = again(calling(), 50).classify(request(0, 70))
    assert ms_of(found)["net.loss"] == 39  # 11 to 50; from then on the peer had it
    culprit = found.culprits["net.loss"]
    assert (culprit.kind, culprit.name) == ("peer", f"peer at port {PORT}")
    assert culprit.detail == "1 segment sent again, 1 of them after time-outs of up to 200 ms"


def test_no_more_than_the_time_out_is_charged() -> None:
    b = calling(400).send(12, LOOP, OTHER)
    found, _ = again(b, 350, seq=99_999).classify(request(0, 410))
    assert ms_of(found)["net.loss"] == 200  # when it was sent is not known


def test_several_time_outs_in_a_row_are_one_stretch() -> None:
    b = again(again(calling(700), 211), 615, rto_us=400_000, timeouts=2)
    found, _ = b.classify(request(0, 710))
    assert ms_of(found)["net.loss"] == pytest.approx(204 + 400 - 4 + 0, abs=5)
    assert "2 segments sent again" in found.culprits["net.loss"].detail


def test_retransmits_on_another_connection_are_a_decoy() -> None:
    found, ctx = again(calling(), 50, OTHER, seq=77).classify(request(0, 70))
    assert "net.loss" not in found.causes
    assert checks(found, ctx)["net.loss"].endswith("on connections that it did not wait for")


def test_a_streamed_chunk_that_is_lost_does_not_hold_up_the_server() -> None:
    # LOOP waits for WORKER's next token, not for room in the socket.
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(10, LOOP, offset=1000, bytes=50)
    b.out(11, LOOP, nr=EPOLL_WAIT).into(12, WORKER).wake(60, LOOP, WORKER).out(61, WORKER).into(60.5, LOOP)
    b.send(65, LOOP, offset=1050).out(70, LOOP)
    found, _ = again(b, 50, COOKIE).classify(request(0, 65))
    assert "net.loss" not in found.causes


def waiting_for_room(b: EventBuilder) -> EventBuilder:
    b.into(-5, LOOP).recv(0, LOOP).send(10, LOOP, offset=500, bytes=500)
    b.out(20, LOOP, nr=SENDTO, arg0=7).wake(230, LOOP, context=SOFTIRQ, vec=NET_RX).into(230, LOOP)
    return b.send(231, LOOP, offset=1000, bytes=5000).out(240, LOOP)


def test_a_response_that_waits_for_room_while_its_packets_are_lost() -> None:
    b = again(waiting_for_room(EventBuilder()), 225, COOKIE)
    found, _ = b.classify(request(0, 231, first_ms=10, client_port=555))
    assert ms_of(found)["net.loss"] == 200  # the time-out before 225
    assert ms_of(found)["net.delivery"] == 10
    assert found.culprits["net.loss"].name == f"client at port {PORT}"


def test_a_loop_that_waits_for_room_may_wake_by_its_own_timers() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(10, LOOP, offset=500, bytes=500, lport=8080)
    b.send(9, LOOP, OTHER, lport=8080)
    b.out(20, LOOP, nr=EPOLL_WAIT).wake(100, LOOP, context=TIMER).into(100, LOOP).out(
        101, LOOP, nr=EPOLL_WAIT
    )
    b.wake(230, LOOP, context=SOFTIRQ, vec=NET_RX).into(230, LOOP)
    b.send(231, LOOP, offset=1000, bytes=5000, lport=8080).out(240, LOOP, nr=EPOLL_WAIT)
    b = again(b, 225, COOKIE, lport=8080, rport=555)
    found, _ = b.classify(request(0, 231, first_ms=10, server_port=8080))
    assert ms_of(found)["net.loss"] == 75 + 124  # the time-out before 225, less what it was awake


def test_a_loop_that_waits_for_a_token_may_wake_by_its_own_timers() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(10, LOOP, offset=500, bytes=500, lport=8080)
    b.send(9, LOOP, OTHER, lport=8080)
    b.out(20, LOOP, nr=EPOLL_WAIT).wake(100, LOOP, context=TIMER).into(100, LOOP).out(
        101, LOOP, nr=EPOLL_WAIT
    )
    b.into(102, WORKER).wake(230, LOOP, WORKER).out(231, WORKER).into(230, LOOP)
    b.send(231, LOOP, offset=1000, bytes=5000, lport=8080).out(240, LOOP, nr=EPOLL_WAIT)
    b = again(b, 225, COOKIE, lport=8080, rport=555)
    found, _ = b.classify(request(0, 231, first_ms=10, server_port=8080))
    assert "net.loss" not in found.causes


def test_what_another_client_lost_is_not_this_requests_cause() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(20, LOOP, nr=EPOLL_WAIT)
    b.wake(230, LOOP, context=SOFTIRQ, vec=NET_RX).into(230, LOOP)
    b.send(231, LOOP, OTHER, lport=8080).send(232, LOOP, lport=8080).out(240, LOOP, nr=EPOLL_WAIT)
    b = again(b, 225, OTHER, lport=8080, rport=7)
    found, _ = b.classify(request(0, 232, server_port=8080))
    assert "net.loss" not in found.causes


def test_a_slow_reader_without_loss_is_delivery_alone() -> None:
    found, ctx = waiting_for_room(EventBuilder()).classify(request(0, 231, first_ms=10))
    assert "net.loss" not in found.causes
    assert ms_of(found)["net.delivery"] == 210
    assert checks(found, ctx)["net.loss"] == "no retransmit on a connection that the request used"


def test_what_the_other_side_sent_again_is_known_if_it_is_on_this_host() -> None:
    b = calling(260)
    b.add("tcp_retransmit", 250, HOG, aux=TIMEOUT, cookie=900, rto_us=200_000, lport=PORT, rport=NEAR)
    found, _ = b.classify(request(0, 270))
    assert ms_of(found)["net.loss"] == 200
    assert all(s.inferred for s in found.segments if s.cause == "net.loss")
    assert found.culprits["net.loss"].detail.startswith("on this host; ")


def test_after_duplicate_acknowledgements_a_round_trip_is_charged_not_a_time_out() -> None:
    found, _ = again(calling(), 50, why=FAST, srtt_us=4000).classify(request(0, 70))
    assert ms_of(found)["net.loss"] == 8


def test_a_syn_that_is_sent_again_is_no_loss_of_this_kind() -> None:
    found, _ = again(calling(), 50, why=SYN).classify(request(0, 70))
    assert "net.loss" not in found.causes


# net.nagle


def held(b: EventBuilder, at: float, held_ms: float, left_ms: float, cookie: int = UP) -> EventBuilder:
    return b.add(
        "sock_held",
        at,
        LOOP,
        **ports(cookie=cookie, held_ns=ns(held_ms), left_ns=ns(left_ms), bytes=2),
    )


def test_a_tail_that_was_held_back_is_charged_until_it_left() -> None:
    found, _ = held(calling(), 60.1, 10, 50).classify(request(0, 70))
    assert ms_of(found)["net.nagle"] == 39
    culprit = found.culprits["net.nagle"]
    assert culprit.name == f"peer at port {PORT}"
    assert culprit.detail == "2 bytes waited 40 ms for an acknowledgement; TCP_NODELAY is off"


def in_a_loop() -> EventBuilder:
    """A loop asks at 10; its rest until the answer at 60 is cut by another request's data at 30, and by a timer."""
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(10, LOOP, UP, **ports(offset=1000, bytes=50))
    b.out(11, LOOP, nr=EPOLL_WAIT).wake(30, LOOP, context=SOFTIRQ, vec=NET_RX).into(30, LOOP)
    b.recv(30.5, LOOP, OTHER, lport=8080, rport=7).out(31, LOOP, nr=EPOLL_WAIT)
    b.wake(40, LOOP, context=TIMER).into(40, LOOP).out(41, LOOP, nr=EPOLL_WAIT)
    b.wake(60, LOOP, context=SOFTIRQ, vec=NET_RX).into(60, LOOP).recv(60.1, LOOP, UP, **ports())
    return b.send(70, LOOP, lport=8080).out(80, LOOP, nr=EPOLL_WAIT)


def test_a_loops_rests_are_one_wait_for_what_it_asked() -> None:
    found, _ = held(in_a_loop(), 60.1, 10, 50).classify(request(0, 70, server_port=8080, recv_ns=ns(0)))
    assert ms_of(found)["net.nagle"] == 19 + 9 + 9
    assert any(s.inferred for s in found.segments if s.cause == "net.nagle")


def test_what_wakes_the_loop_meanwhile_may_be_for_others() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(10, LOOP, UP, **ports(offset=1000, bytes=50))
    b.send(-4, LOOP, OTHER, lport=8080).into(-5, WORKER).out(5, WORKER, nr=NANOSLEEP)
    b.out(11, LOOP, nr=EPOLL_WAIT).wake(30, WORKER, context=TIMER).into(30, WORKER)
    b.wake(30.5, LOOP, WORKER).out(31, WORKER, nr=NANOSLEEP).into(30.5, LOOP)
    b.send(31, LOOP, OTHER, lport=8080).out(32, LOOP, nr=EPOLL_WAIT)
    b.wake(60, LOOP, context=SOFTIRQ, vec=NET_RX).into(60, LOOP).recv(60.1, LOOP, UP, **ports())
    b.send(70, LOOP, lport=8080).out(80, LOOP, nr=EPOLL_WAIT)
    found, _ = held(b, 60.1, 10, 50).classify(request(0, 70, server_port=8080, recv_ns=ns(0)))
    assert ms_of(found)["net.nagle"] == 18 + 20  # while the path is on the worker, too
    found, _ = held(b, 60.1, 10, 50).classify(request(20, 70, server_port=8080, recv_ns=ns(20)))
    assert ms_of(found).get("net.nagle", 0) == 18  # another request's: only the wait that its answer ended


def test_a_loops_rests_are_not_charged_to_what_other_clients_lost() -> None:
    b = in_a_loop().send(5, LOOP, OTHER, lport=8080, rport=7)
    b = held(again(b, 50, OTHER, lport=8080, rport=7), 60.2, 10, 50, OTHER)
    found, _ = b.classify(request(0, 70, server_port=8080, recv_ns=ns(0)))
    assert not {"net.loss", "net.nagle"} & {s.cause for s in found.segments if s.start_ns > ns(31)}


def test_a_tail_held_back_for_a_round_trip_is_usual() -> None:
    found, _ = held(calling(), 60.1, 10, 13).classify(request(0, 70))
    assert "net.nagle" not in found.causes


def test_a_tail_on_another_connection_is_a_decoy() -> None:
    found, ctx = held(calling(), 60.1, 10, 50, OTHER).classify(request(0, 70))
    assert "net.nagle" not in found.causes
    assert checks(found, ctx)["net.nagle"].startswith("40.0 ms of it beside the request")


def test_a_held_back_response_is_told_where_the_cause_is_ruled_out() -> None:
    found, ctx = held(calling(), 80, 60, 100, COOKIE).classify(request(0, 70))
    assert "net.nagle" not in found.causes
    assert checks(found, ctx)["net.nagle"] == (
        "writes of the response were held back 40 ms after the server wrote them"
    )


def test_held_back_first_and_lost_then_are_both_told() -> None:
    b = again(held(calling(300), 300.1, 10, 50), 250)
    found, _ = b.classify(request(0, 310))
    assert ms_of(found)["net.nagle"] == 39
    assert ms_of(found)["net.loss"] == 200


# net.transport


def hole(b: EventBuilder, ms: float, cookie: int = UP) -> EventBuilder:
    return b.add("sock_hole", ms, LOOP, **ports(cookie=cookie, packets=3, total=3, srtt_us=150))


def in_two_parts() -> EventBuilder:
    """The first part of the answer comes at once, the rest at 60."""
    b = calling()
    return b.recv(10.5, LOOP, UP, **ports())


def test_a_message_that_stops_in_its_middle_with_packets_out_of_order() -> None:
    found, _ = hole(in_two_parts(), 60.1).classify(request(0, 70))
    assert ms_of(found)["net.transport"] == 49
    assert all(s.inferred for s in found.segments if s.cause == "net.transport")
    assert found.culprits["net.transport"].name == f"peer at port {PORT}"


def test_before_a_messages_first_byte_it_is_the_peers_time_to_think() -> None:
    found, _ = hole(calling(), 60.1).classify(request(0, 70))
    assert "net.transport" not in found.causes


@pytest.mark.parametrize(("ms", "cookie"), [(65.0, OTHER), (90.0, UP)])
def test_other_holes_are_decoys(ms: float, cookie: int) -> None:
    found, _ = hole(in_two_parts(), ms, cookie).classify(request(0, 70))
    assert "net.transport" not in found.causes


def test_a_body_that_comes_in_pieces_without_holes_is_usual() -> None:
    found, ctx = in_two_parts().classify(request(0, 70))
    assert "net.transport" not in found.causes
    assert checks(found, ctx)["net.transport"].startswith("no packet came out of order")


def test_what_is_known_to_be_loss_is_not_left_to_the_parent() -> None:
    b = hole(in_two_parts(), 60.1)
    b.add("tcp_retransmit", 59, HOG, aux=TIMEOUT, cookie=900, rto_us=200_000, lport=PORT, rport=NEAR)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["net.loss"] == 48
    assert ms_of(found)["net.transport"] == 1


# net.connection_setup


def connecting(end: float, ms: float, tid: int = LOOP, nr: int = CONNECT, **payload: Any) -> EventBuilder:
    """LOOP serves a request 0-80 and is in connect (or in another call) from 10 to 60."""
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(10, LOOP, nr=nr, arg0=7)
    b.wake(60, LOOP, context=SOFTIRQ, vec=NET_RX).into(60, LOOP).send(61, LOOP, UP, **ports())
    own = {"cookie": UP, "duration_ns": round(ms * MS), **payload}
    b.add("tcp_connect", end, tid, **ports(**own))
    return b.send(80, LOOP).out(85, LOOP, nr=EPOLL_WAIT)


def test_a_slow_connect_names_the_peer_and_how_often_connections_are_used() -> None:
    found, _ = connecting(60, 50.2, again=1).classify(request(0, 80))
    assert ms_of(found)["net.connection_setup"] == 50
    culprit = found.culprits["net.connection_setup"]
    assert (culprit.kind, culprit.name) == ("peer", f"peer at port {PORT}")
    assert culprit.detail == "1 connections set up lately for 1 exchanges on 1"
    assert f"connection to port {PORT}, its SYN sent 2 times" in found.evidence["net.connection_setup"]


def test_a_connect_in_an_event_loop_is_inferred() -> None:
    b = connecting(60, 50.2, nr=EPOLL_WAIT)
    found, _ = b.classify(request(0, 80))
    assert ms_of(found)["net.connection_setup"] == 50
    assert all(s.inferred for s in found.segments if s.cause == "net.connection_setup")


def test_a_loop_that_rests_while_it_connects_may_wake_by_its_own_timers() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(10, LOOP, nr=EPOLL_WAIT)
    b.wake(40, LOOP, context=TIMER).into(40, LOOP).out(41, LOOP, nr=EPOLL_WAIT)
    b.wake(60, LOOP, context=SOFTIRQ, vec=NET_RX).into(60, LOOP).send(61, LOOP, UP, **ports())
    b.add("tcp_connect", 60, LOOP, **ports(cookie=UP, duration_ns=round(50.2 * MS)))
    found, _ = b.send(80, LOOP).out(85, LOOP, nr=EPOLL_WAIT).classify(request(0, 80))
    assert ms_of(found)["net.connection_setup"] == 49


def test_a_connect_that_fails_says_so() -> None:
    found, _ = connecting(60, 50.2, failed=1, error=111).classify(request(0, 80))
    assert f"connection to port {PORT}, which failed (error 111)" in found.evidence["net.connection_setup"]


def test_many_exchanges_on_one_connection_are_counted() -> None:
    b = connecting(60, 50.2)
    for i in range(5):
        b.recv(62 + 2 * i, LOOP, UP, **ports()).send(63 + 2 * i, LOOP, UP, **ports())
    found, _ = b.classify(request(0, 80))
    culprit = found.culprits["net.connection_setup"]
    assert culprit.detail == "1 connections set up lately for 6 exchanges on 1"


@pytest.mark.parametrize(
    ("end", "ms", "tid", "nr"),
    [
        (60, 0.4, LOOP, RECV),  # a near peer's round trip
        (60, 50.2, WORKER, RECV),  # another thread's
        (-10, 50.2, LOOP, RECV),  # before the request
    ],
)
def test_other_connects_are_decoys(end: float, ms: float, tid: int, nr: int) -> None:
    found, ctx = connecting(end, ms, tid, nr).classify(request(0, 80))
    assert "net.connection_setup" not in found.causes
    assert "none that the path waited for long" in checks(found, ctx)["net.connection_setup"]


def test_without_any_connect_there_is_no_set_up() -> None:
    found, ctx = calling().classify(request(0, 70))
    assert "net.connection_setup" not in found.causes
    assert checks(found, ctx)["net.connection_setup"] == "no connection was set up on the path"


def test_the_handshake_of_a_client_is_part_of_it_and_that_of_a_server_is_not() -> None:
    b = calling()
    b.add("tls_handshake", 60, LOOP, begin_ns=ns(9), cookie=UP, rport=443)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["net.connection_setup"] == 49
    assert "peer at port 443" in found.culprits["net.connection_setup"].name
    b = calling().recv(9.5, LOOP, UP, **ports())  # it received first: a server
    b.add("tls_handshake", 60, LOOP, begin_ns=ns(9), cookie=UP, rport=443)
    found, _ = b.classify(request(0, 70))
    assert "net.connection_setup" not in found.causes


# net.dns


def resolving(until: float, *, port: int = 53, timer: bool = False, kind: int = SOCKET) -> EventBuilder:
    """LOOP serves a request and waits in poll from 10 on a socket with that remote port."""
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).out(10, LOOP, nr=POLL, arg0=7)
    b.add("fd_block", 10, LOOP, aux=kind, fd=7, key=OTHER, syscall_nr=POLL, rport=port)
    wake = {"context": TIMER} if timer else {"context": SOFTIRQ, "vec": NET_RX}
    b.wake(until, LOOP, **wake).into(until, LOOP)
    return b.send(until + 10, LOOP).out(until + 20, LOOP, nr=EPOLL_WAIT)


def asked(b: EventBuilder, *messages: tuple[float, int], tid: int = LOOP) -> EventBuilder:
    for ms, aux in messages:
        b.add("dns_message", ms, tid, aux=aux, cookie=OTHER, bytes=40, rport=53)
    return b


def test_a_wait_for_port_53_is_a_resolvers() -> None:
    b = asked(resolving(90), (9.9, 1), (9.95, 1), (90.1, 2), (90.2, 2))
    found, _ = b.classify(request(0, 100))
    assert ms_of(found)["net.dns"] == 80
    culprit = found.culprits["net.dns"]
    assert (culprit.kind, culprit.name, culprit.detail) == (
        "peer",
        "resolver at port 53",
        "2 queries, 2 answers",
    )


def test_a_time_out_of_the_resolver_is_named() -> None:
    b = asked(resolving(5010, timer=True), (9.9, 5), (5010.1, 5), (5010.5, 6))
    found, _ = b.classify(request(0, 5020))
    assert ms_of(found)["net.dns"] == 5000
    culprit = found.culprits["net.dns"]
    assert culprit.name == "resolver at port 53 on this host"
    assert culprit.detail == "2 queries, 1 answers, a wait of 1 x 5 s: the resolver's time-out"


def test_an_answer_in_2_ms_is_usual() -> None:
    found, ctx = asked(resolving(12), (9.9, 1), (12.1, 2)).classify(request(0, 22))
    assert "net.dns" not in found.causes
    assert checks(found, ctx)["net.dns"] == "no wait for a resolver on the path"


@pytest.mark.parametrize(("port", "kind"), [(443, SOCKET), (53, 3)])
def test_other_polls_are_no_names(port: int, kind: int) -> None:
    found, _ = resolving(90, port=port, kind=kind).classify(request(0, 100))
    assert "net.dns" not in found.causes


def test_names_that_another_thread_resolves_are_a_decoy() -> None:
    b = asked(calling(), (10, 1), (59, 2), tid=WORKER)
    found, _ = b.classify(request(0, 70))
    assert "net.dns" not in found.causes


def test_a_resolver_in_an_event_loop_is_seen_by_its_messages() -> None:
    b = asked(connecting(-10, 1, nr=EPOLL_WAIT), (9.9, 1), (60.1, 2))
    found, _ = b.classify(request(0, 80))
    assert ms_of(found)["net.dns"] == 50
    assert all(s.inferred for s in found.segments if s.cause == "net.dns")


def test_a_name_and_then_a_connect_are_both_told() -> None:
    b = resolving(90)
    b.rows = [r for r in b.rows if r[0] < ns(95)]
    b.out(95, LOOP, nr=CONNECT, arg0=7).wake(145, LOOP, context=SOFTIRQ, vec=NET_RX).into(145, LOOP)
    b.add("tcp_connect", 145, LOOP, **ports(cookie=UP, duration_ns=50 * MS))
    b.add("tcp_connect", 95, LOOP, rport=53, duration_ns=80 * MS)  # the resolver's own, over TCP
    found, _ = b.send(150, LOOP).out(160, LOOP).classify(request(0, 150))
    assert ms_of(found)["net.dns"] == 80
    assert ms_of(found)["net.connection_setup"] == 50


# net.accept_overflow


def unread(**full: Any) -> EventBuilder:
    """A request reaches its connection at 0 and is read at 150; the loop is busy until then."""
    b = EventBuilder().into(-50, LOOP).recv(150, LOOP)
    if full:
        values = {"lport": 8080, "backlog": 5, "limit": 4, "drops": 7, **full}
        at = values.pop("at", -1)
        b.add("accept_queue", -160, HOG, **{**values, "drops": 3, "backlog": 4})
        b.add("accept_queue", at, HOG, **values)
    return b.send(170, LOOP).out(180, LOOP, nr=EPOLL_WAIT)


def arriving(**fields: Any) -> Any:
    return request(0, 170, **{"recv_ns": ns(150), "server_port": 8080, "client_port": 555, **fields})


def test_a_full_listen_queue_names_who_listens() -> None:
    found, _ = unread(backlog=5).classify(arriving())
    assert ms_of(found)["net.accept_overflow"] == 150
    culprit = found.culprits["net.accept_overflow"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "server", 100)
    assert culprit.detail == (
        "port 8080: 5 connections waited to be accepted, the limit is 4; 4 connections refused lately"
    )


def test_only_the_time_while_it_was_full_is_charged() -> None:
    b = unread(at=100)
    b.rows = [r for r in b.rows if r[0] > ns(-100)]
    found, _ = b.classify(arriving())
    assert ms_of(found)["net.accept_overflow"] == 50


def test_what_was_lost_before_is_evidence() -> None:
    b = unread(backlog=5)
    b.add("tcp_retransmit", -100, HOG, aux=SYN, lport=555, rport=8080)
    b.add("tcp_synack", -90, HOG, aux=1, lport=8080, rport=555, again=1)
    found, _ = b.classify(arriving())
    detail = found.culprits["net.accept_overflow"].detail
    assert detail.endswith("this one's SYN was sent again 1 times before, its SYN-ACK 1 times")


@pytest.mark.parametrize(
    ("full", "fields"),
    [
        ({}, {}),  # it waits for the loop, in a queue with room
        ({"lport": 9999}, {}),  # another service's queue
        ({"backlog": 5}, {"seq": 1}),  # on a connection that was accepted long ago
        ({"at": 160}, {}),  # full afterwards
    ],
)
def test_waiting_for_a_busy_server_is_not_the_queues_fault(
    full: dict[str, Any], fields: dict[str, Any]
) -> None:
    b = unread(**full)
    if full.get("at"):
        b.rows = [r for r in b.rows if r[0] > ns(-100)]
    found, _ = b.classify(arriving(**fields))
    assert "net.accept_overflow" not in found.causes


def test_a_full_queue_beside_a_request_that_is_read_at_once_is_told() -> None:
    found, ctx = unread(backlog=5).classify(arriving(recv_ns=ns(0)))
    assert "net.accept_overflow" not in found.causes
    assert checks(found, ctx)["net.accept_overflow"].startswith(
        "unread for 0.0 ms; the listen queue was full beside the request; 4 connections refused lately"
    )
