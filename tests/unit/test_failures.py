"""Failed requests in words: how each ended, and who died beside it."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import numpy as np
import pytest
from whyspan import failures
from whyspan.facts import Facts
from whyspan.model import Batch, ProcessFact, Request
from whyspan_probes.schema import EVENT

from tests.unit.timeline import MS, SERVER, ns, request
from tests.unit.wire import SCHEMA, Wire

CORE, HELPER, STRANGER = 200, 201, 300
SEGV_AND_CORE = 0x80 | signal.SIGSEGV


def facts(deaths: Wire | None = None) -> Facts:
    """Return what is known of the service and its engine core, after these deaths."""
    known = Facts()
    names = [ProcessFact(SERVER, "vllm", service="svc"), ProcessFact(CORE, "EngineCore", service="svc")]
    known.update(Batch(0, np.empty(0, EVENT), facts=[*names, ProcessFact(STRANGER, "cc", "s")]), SCHEMA)
    if deaths is not None:
        known.update(Batch(0, deaths.chunk()), SCHEMA)
    return known


def failed(end_ms: float = 812, **fields: Any) -> Request:
    """Return a request from 0 ms on that got no answer unless *fields* say so."""
    none: dict[str, Any] = {"outcome": "reset", "status": 0, "head_ns": 0, "first_ns": 0}
    return request(0, end_ms, **none | fields)


def streaming(end_ms: float = 812, **fields: Any) -> Request:
    """Return one that was in the middle of its response."""
    started = {"status": 200, "head_ns": ns(5), "first_ns": ns(6), "chunks": 14}
    return failed(end_ms, **started | fields)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            failed(3, outcome="error", status=429, ended_by="server"),
            "Failed with 429 after 3 ms",
        ),
        (
            failed(0.25, outcome="error", status=400, ended_by="server", head="cut"),
            "Failed with 400 after 0.2 ms, before its head was whole",
        ),
        (
            failed(9, outcome="error", status=431, ended_by="server", head="malformed"),
            "Failed with 431 after 9 ms, its head being malformed",
        ),
        (
            streaming(ended_by="client_close", left_ns=ns(811)),
            "The client closed the connection after 811 ms and 14 chunks",
        ),
        (
            failed(5000, ended_by="client_close", left_ns=ns(2000)),
            "The client closed the connection after 2000 ms, before any answer; the server took 3000 ms to notice",
        ),
        (failed(ended_by="client_close"), "The client closed the connection after 812 ms, before any answer"),
        (
            streaming(ended_by="client_reset", chunks=1),
            "The client reset the connection after 812 ms and 1 chunk",
        ),
        (
            streaming(ended_by="server_close", chunks=0, first_ns=0),
            "The server closed the connection after 812 ms, before any byte of the answer's body",
        ),
        (
            failed(ended_by="server_reset", head="unread"),
            "The server reset the connection after 812 ms, before anybody had read the request",
        ),
        (
            failed(ended_by="client_reset", head="cut"),
            "The client reset the connection after 812 ms, before the request's head was whole",
        ),
        (
            streaming(ended_by="timeout"),
            "The client's side no longer answered and the connection timed out after 812 ms and 14 chunks",
        ),
        (
            streaming(outcome="killed", ended_by="process_exit", exit_code=9),
            f"Process {SERVER} (vllm) was killed by signal 9 (SIGKILL) after 812 ms and 14 chunks",
        ),
        (failed(), "The connection ended after 812 ms, before any answer"),  # of a recording of old
    ],
)
def test_how_a_request_ended(wanted: Request, text: str) -> None:
    assert failures.ending(wanted, facts()) == text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with status 0"),
        (3 << 8, "ended with status 3"),
        (9, "was killed by signal 9 (SIGKILL)"),
        (SEGV_AND_CORE, "was killed by signal 11 (SIGSEGV)"),
        (40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended(code: int, text: str) -> None:
    assert failures.how(code) == text


CORE_DIED = f"process {CORE} (EngineCore) of the same service was killed by signal 9 (SIGKILL)"


def test_another_process_of_the_service_died_during_the_request() -> None:
    deaths = Wire().exit(312, CORE).exit(400, STRANGER).exit(812, SERVER)
    wanted = failed(outcome="killed", ended_by="process_exit")
    assert failures.deaths(wanted, facts(deaths)) == [f"312 ms after its start {CORE_DIED}"]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (failed(ended_by="client_close"), True),  # it waited in vain
        (streaming(outcome="error", status=500, ended_by="server"), True),
        (streaming(ended_by="client_close"), False),  # it was being served
        (failed(outcome="error", status=429, ended_by="server"), False),
        (failed(outcome="killed", ended_by="process_exit"), False),
    ],
)
def test_a_death_before_counts_where_the_request_came_to_nothing(wanted: Request, told: bool) -> None:
    at_ms = 70_000
    wanted = msgspec.structs.replace(
        wanted, start_ns=ns(at_ms), end_ns=wanted.end_ns + at_ms * MS, head_ns=0, first_ns=0
    )
    found = failures.deaths(wanted, facts(Wire().exit(at_ms - 3100, CORE)))
    assert found == ([f"{CORE_DIED} 3100 ms before its start"] if told else [])
    assert failures.deaths(wanted, facts(Wire().exit(at_ms - 60_001, CORE))) == []


def test_ends_in_good_order_and_the_requests_own_helpers_explain_nothing() -> None:
    w = Wire().exit(100, CORE, exit_code=0)
    w.tgids[SERVER] = SERVER
    w.add("sched_fork", 5, SERVER, child_tid=HELPER, child_tgid=HELPER).exit(200, HELPER, exit_code=1 << 8)
    wanted = failed(outcome="error", status=500, ended_by="server")
    assert failures.deaths(wanted, facts(w)) == []
    # A helper that crashed does, and so does an error of one that was there before.
    w = Wire().add("sched_fork", 5, SERVER, child_tid=HELPER, child_tgid=HELPER).exit(300, HELPER)
    w.exit(200, CORE, exit_code=1 << 8)
    assert [text.split(" of ")[0] for text in failures.deaths(wanted, facts(w))] == [
        f"300 ms after its start process {HELPER} (vllm)",
        f"200 ms after its start process {CORE} (EngineCore)",
    ]


def test_no_more_than_three_are_listed() -> None:
    w = Wire()
    for i in range(9):
        w.add("sched_fork", -100, SERVER, child_tid=500 + i, child_tgid=500 + i).exit(10 + i, 500 + i)
    found = failures.deaths(failed(), facts(w))
    assert [text.split(" (")[0].split()[-1] for text in found] == ["500", "501", "502"]
