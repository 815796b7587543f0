"""TLS handshakes: which side, full or resumed, from what moved on the connection meanwhile."""

from __future__ import annotations

import pytest
from whyspan.tls import Handshake, handshakes

from tests.unit.timeline import COOKIE, LOOP, EventBuilder, ns

UPSTREAM = COOKIE + 1


def shaken(b: EventBuilder, start: float, end: float, key: int = COOKIE) -> Handshake:
    b.add("tls_handshake", end, LOOP, begin_ns=ns(start), cookie=key, session=7, calls=3, lport=443, rport=5)
    (found,) = handshakes(b.timelines(0, end + 10))
    return found


@pytest.mark.parametrize(("flight", "resumed"), [(141, True), (241, True), (616, False), (1354, False)])
def test_a_server_sends_its_first_flight_second(flight: int, resumed: bool) -> None:
    b = EventBuilder().recv(11, LOOP, bytes=517).send(12, LOOP, bytes=flight).recv(20, LOOP, bytes=80)
    b.send(20.5, LOOP, bytes=510)  # tickets
    found = shaken(b, 10, 21)
    assert (found.as_server, found.resumed, found.kind) == (True, resumed, "resumed" if resumed else "full")
    assert (found.start_ns, found.end_ns, found.tid, found.cookie) == (ns(10), ns(21), LOOP, COOKIE)


def test_a_client_reads_it_in_pieces() -> None:
    b = EventBuilder().send(11, LOOP, UPSTREAM, bytes=517)
    for k in range(5):
        b.recv(12 + k, LOOP, UPSTREAM, bytes=200)
    found = shaken(b.send(18, LOOP, UPSTREAM, bytes=80), 10, 19, UPSTREAM)
    assert (found.as_server, found.resumed) == (False, False)


def test_what_came_before_it_or_on_other_connections_is_not_of_it() -> None:
    b = EventBuilder().recv(5, LOOP, bytes=9).send(11, LOOP, UPSTREAM, bytes=9000)
    found = shaken(b, 10, 19)
    assert (found.as_server, found.resumed, found.kind) == (None, None, "handshake")


def test_without_a_connection_nothing_is_said() -> None:
    assert shaken(EventBuilder().recv(11, LOOP, 0, bytes=517), 10, 19, 0).resumed is None
    assert handshakes(EventBuilder().recv(1, LOOP).timelines(0, 10)) == []
