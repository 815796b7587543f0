"""What senders claim of their requests: parsed, bounded, and held against what they claimed before."""

from __future__ import annotations

import pytest
from whyspan import senders
from whyspan.beside import Beside
from whyspan.facts import Facts
from whyspan.heads import HeadAssembler
from whyspan.requests import RequestTable

from tests.unit.timeline import MS, ns, request
from tests.unit.wire import SCHEMA, Wire, piece

T = 1_700_000_000


@pytest.mark.parametrize(
    ("text", "unix_ns"),
    [
        ("t=1700000000.123", T * 10**9 + 123 * 10**6),  # nginx
        ("1700000000.5", T * 10**9 + 500 * 10**6),
        ("1700000000123", T * 10**9 + 123 * 10**6),  # Heroku
        ("t=1700000000123456", T * 10**9 + 123_456_000),  # New Relic
        ("1700000000123456789", T * 10**9 + 123_456_789),
        (" t=1700000000 ", T * 10**9),
        ("", 0),
        ("now", 0),
        ("t=-1700000000", 0),
        ("t=1700000000.123; x", 0),
        ("t=" + "9" * 40, 0),
        ("t=1.7e9", 0),
    ],
)
def test_when_it_began(text: str, unix_ns: int) -> None:
    assert senders.unix_start_ns({"x-request-start": text}) == unix_ns
    assert senders.unix_start_ns({"x-queue-start": text}) == unix_ns


@pytest.mark.parametrize(
    ("text", "agent"),
    [
        ("Prometheus/2.53.0", "Prometheus/2.53.0"),
        ("OpenAI/Python 1.2.3 (linux)", "OpenAI/Python"),
        ("curl", "curl"),
        ("", ""),
        ("\\x1b[31m", ""),
        ("a" * 200, "a" * 64),
    ],
)
def test_who_it_is(text: str, agent: str) -> None:
    assert senders.agent_of({"user-agent": text}) == agent


@pytest.mark.parametrize(
    ("headers", "attempt"),
    [
        ({"x-stainless-retry-count": "2"}, 2),
        ({"x-envoy-attempt-count": "1"}, 0),
        ({"x-envoy-attempt-count": "3"}, 2),
        ({"x-stainless-retry-count": "-1"}, 0),
        ({"x-stainless-retry-count": "99999"}, 0),
        ({"x-stainless-retry-count": "9999"}, 1000),
        ({}, 0),
    ],
)
def test_how_often_it_tried(headers: dict[str, str], attempt: int) -> None:
    assert senders.attempt_of(headers) == attempt


def test_a_delay_is_held_against_what_the_sender_claimed_before() -> None:
    clocks = senders.SenderClocks()
    skew = -3000 * MS  # its clock is ahead: its requests seem to begin after they arrived
    for k in range(20):
        assert clocks.waited_ns(("a",), ns(k) - skew, ns(k)) == 0
    assert clocks.waited_ns(("a",), ns(100) - 700 * MS - skew, ns(100)) == 700 * MS


def test_the_first_claims_of_a_sender_are_not_believed() -> None:
    clocks = senders.SenderClocks()
    for k in range(senders.MIN_CLAIMS - 1):
        assert clocks.waited_ns(("a",), ns(k), ns(k) + (1 + k) * 1000 * MS) == 0
    assert clocks.waited_ns(("b",), ns(0), ns(0) + 9000 * MS) == 0


def test_what_is_out_of_bounds_is_no_claim() -> None:
    clocks = senders.SenderClocks()
    for k in range(20):
        clocks.waited_ns(("a",), ns(k), ns(k))
    assert clocks.waited_ns(("a",), ns(0), ns(0) + senders.MAX_AWAY_NS + 1) == 0
    assert clocks.waited_ns(("a",), 0, ns(0)) == 0


def test_claims_of_many_senders_are_bounded() -> None:
    clocks = senders.SenderClocks()
    for k in range(5000):
        clocks.waited_ns((str(k),), ns(k), ns(k))
    assert len(clocks._claims) == 1024


def test_a_head_s_time_is_turned_into_the_monotonic_clock_s() -> None:
    offset = T * 10**9
    assembler = HeadAssembler(["x-request-start", "user-agent"], lambda: offset)
    began = ns(0) - 250 * MS
    seconds, rest = divmod(offset + began, 10**9)
    text = f"GET /x HTTP/1.1\r\nuser-agent: a/1\r\nx-request-start: t={seconds}.{rest:09d}\r\n\r\n"
    (head,) = assembler.feed([piece(text.encode(), first_ns=ns(0))])
    assert head.sent_ns == began
    (far,) = assembler.feed(
        [piece(b"GET /x HTTP/1.1\r\nx-request-start: t=1000000000\r\n\r\n", seq=1, first_ns=ns(0))]
    )
    assert far.sent_ns == 0


def test_a_request_says_how_long_it_waited_with_its_sender() -> None:
    w = Wire()
    for k in range(10):
        w.ask(
            10 * k, cookie=k, first_ns=ns(10 * k), sent_ns=ns(10 * k - 1), headers={"user-agent": "bench/1 x"}
        )
        w.done(10 * k + 5, cookie=k)
    w.ask(200, cookie=99, first_ns=ns(200), sent_ns=ns(50), headers={"user-agent": "bench/1"}).done(
        210, cookie=99
    )
    facts, table = Facts(), RequestTable(SCHEMA, "i")
    ended = [r for batch in w.batches(500) for r in table.feed(batch, facts)]
    assert [round(r.client_wait_ns / MS) for r in ended] == [0] * 10 + [149]
    assert ended[-1].agent == "bench/1"


# the requests beside


def test_requests_beside_are_bounded_and_in_order() -> None:
    beside = Beside(limit=100)
    beside.begun(request(k, k + 5, cookie=k) for k in range(250))
    assert [r.cookie for r in beside.arrived("svc", ns(0), ns(1000))] == list(range(150, 250))
    assert [r.cookie for r in beside.around("svc", ns(200), ns(202))] == [196, 197, 198, 199, 200, 201]
    assert beside.arrived("other", ns(0), ns(1000)) == []
    for k in range(500):
        beside.begun([request(0, 1, service=f"s{k}")])
    assert len(beside._services) == 64


def test_one_that_ends_later_is_seen_to_have_ended() -> None:
    beside, r = Beside(), request(0, 0)
    r.end_ns = 0
    beside.begun([r])
    assert beside.around("svc", ns(500), ns(600)) == [r]
    r.end_ns = ns(10)
    assert beside.around("svc", ns(500), ns(600)) == []
