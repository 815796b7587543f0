"""Rules on clients: delays before the wire, bodies that trickle in, retries; and what they must not claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from whyspan import verdict
from whyspan.baseline import BY_SENDER, Baseline
from whyspan.beside import Beside
from whyspan.causes import Classified, Context, classify, retries, rule_out
from whyspan.critical_path import NET_RX, walk
from whyspan.model import Finding, Request

from tests.unit.test_verdict import usually
from tests.unit.timeline import (
    EPOLL_WAIT,
    HOG,
    LOOP,
    MS,
    WORKER,
    EventBuilder,
    ms_of,
    ns,
    request,
)

RECVFROM = 45


def checks(found: Classified, ctx: Context) -> dict[str, str]:
    return {r.cause: r.check for r in rule_out(found, ctx)}


# client.artifact


def trickled(nr: int = EPOLL_WAIT, pieces: int = 5, gap: float = 20, by: int = 0) -> EventBuilder:
    """LOOP reads a request in pieces, one every *gap* ms from 0 on, works 10 ms and answers."""
    b = EventBuilder().into(-5, LOOP).recv(0.2, LOOP)
    for k in range(1, pieces):
        t = gap * k
        b.out(t - gap + 1, LOOP, nr=nr)
        b.wake(t, LOOP, by, context=0 if by else 2, vec=NET_RX).into(t, LOOP).recv(t + 0.2, LOOP)
    end = gap * (pieces - 1) + 10
    return b.send(end, LOOP).out(end + 1, LOOP, nr=EPOLL_WAIT)


def upload(**fields: object) -> Request:
    values = {"recv_ns": ns(0.1), "request_bytes": 5000, "client_port": 50000, "agent": "bench/1", **fields}
    return request(0, 90, **values)


@pytest.mark.parametrize(("nr", "by"), [(EPOLL_WAIT, 0), (RECVFROM, 0), (EPOLL_WAIT, HOG)])
def test_a_body_that_trickles_in_is_the_client_s_doing(nr: int, by: int) -> None:
    found, _ = trickled(nr, by=by).classify(upload())
    assert ms_of(found) == {"client.artifact": 76, "work.cpu": 14}
    culprit = found.culprits["client.artifact"]
    assert (culprit.kind, culprit.name, culprit.detail) == ("peer", "bench/1", "sent 5,000 bytes over 80 ms")


def test_a_request_in_one_go_is_not() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .recv(0.2, LOOP)
        .out(1, LOOP, nr=EPOLL_WAIT)
        .wake(60, LOOP, context=2, vec=NET_RX)
    )
    found, ctx = b.into(60, LOOP).send(90, LOOP).out(91, LOOP).classify(upload())
    assert "client.artifact" not in found.causes
    assert checks(found, ctx)["client.artifact"].startswith("the request arrived in one go")


def test_what_the_server_does_between_two_reads_is_its_own() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .recv(0.2, LOOP)
        .recv(80, LOOP)
        .send(90, LOOP)
        .out(91, LOOP, nr=EPOLL_WAIT)
    )
    found, _ = b.classify(upload())
    assert "client.artifact" not in found.causes


def test_a_slow_upload_and_a_neighbour_are_told_apart() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0.2, LOOP).out(1, LOOP, nr=EPOLL_WAIT)
    b.wake(40, LOOP, context=2, vec=NET_RX).into(70, LOOP, HOG).recv(70.2, LOOP).send(90, LOOP).out(91, LOOP)
    found, _ = b.classify(upload())
    assert ms_of(found) == {"client.artifact": 39, "cpu.runqueue": 30, "work.cpu": 21}


def test_a_wait_after_the_whole_request_is_not_the_client_s() -> None:
    b = trickled(pieces=2)
    b.rows = [r for r in b.rows if r[0] < ns(29)]
    b.out(25, LOOP, nr=EPOLL_WAIT).wake(80, LOOP, context=2, vec=NET_RX).into(80, LOOP).send(90, LOOP).out(
        91, LOOP
    )
    found, _ = b.classify(upload())
    assert ms_of(found)["client.artifact"] == 19
    assert ms_of(found)["work.peer"] == 55


# client.self_queued


def explained(waited_ms: float, wall: float = 100, sleep: float = 0) -> tuple[Finding, str | None, Baseline]:
    b = EventBuilder().into(-5, LOOP)
    if sleep:
        b.out(10, LOOP, 0, next_tid=HOG).into(10 + sleep, LOOP, HOG)
    wanted = request(0, wall, client_wait_ns=round(waited_ms * MS), agent="bench/1")
    baseline = usually(100, {"work.cpu": 100})
    reason = baseline.is_slow(wanted, None)
    found, ctx = b.out(5000, LOOP).classify(wanted)
    return verdict.explain(wanted, found, baseline, reason or "latency", 0, ctx), reason, baseline


def test_a_delay_before_the_wire_is_no_cause_of_the_server() -> None:
    """N2: the benchmark counted its own admission gate."""
    finding, reason, _ = explained(30_000)
    assert reason is not None and BY_SENDER in reason
    v = finding.verdict
    assert (v.cause, v.excess_ms, v.culprit.kind, v.culprit.name) == (
        "client.self_queued",
        30_000,
        "peer",
        "bench/1",
    )
    assert v.share == 1
    assert v.others == []
    assert "Here it took 100 ms, usually 100 ms" in v.sentence
    assert finding.causes == {"work.cpu": 100}
    assert "client.self_queued" not in {r.cause for r in finding.ruled_out}


def test_what_the_server_lost_comes_first_where_it_is_more() -> None:
    finding, reason, _ = explained(50, 500, 400)
    assert reason is not None and BY_SENDER not in reason
    assert finding.verdict.cause == "cpu.runqueue"
    assert any(line.startswith("also client.self_queued: 50.0 ms") for line in finding.verdict.evidence)


def test_both_are_reported_where_the_sender_s_delay_is_more() -> None:
    finding, _, _ = explained(1000, 500, 400)
    assert finding.verdict.cause == "client.self_queued"
    assert [(o.cause, o.excess_ms) for o in finding.verdict.others] == [("cpu.runqueue", 400)]


def test_a_usual_delay_does_not_make_a_request_slow_nor_unusual() -> None:
    _, reason, baseline = explained(50)
    assert reason is None
    waited = request(0, 100, client_wait_ns=3000 * MS)
    assert baseline.is_slow(waited, None)
    assert baseline.observe(waited, {"work.cpu": 100})  # here it was as always


# client.retry_storm


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what came long before the request, too: these tests are about who comes again, not about when."""
    monkeypatch.setattr(retries, "BEFORE_NS", retries.WINDOW_NS)


def attempt(k: int, start: float, end: float, status: int = 200, **fields: object) -> Request:
    left = fields.pop("left", False)
    values = {
        "cookie": 1000 + k,
        "status": status,
        "trace_id": f"{k:032x}",
        "agent": "bench/1",
        "request_bytes": 64,
    }
    more = {"outcome": "reset", "ended_by": "client_close", "status": 0} if left else {}
    return request(start, end, **{**values, **more, **fields})


def tried_again(groups: int, tries: int, delay: float = 1000) -> list[Request]:
    """Every first attempt is given up after 200 ms and tried again after *delay*; the first ones come irregularly."""
    out: list[Request] = []
    for g in range(groups):
        start = g * 377.0 + 53 * (g % 5) - 12_000
        for t in range(tries):
            at = start + t * (200 + delay)
            out.append(attempt(len(out), at, at + 200, left=t < tries - 1))
    return sorted(out, key=lambda r: r.start_ns)


def storming(
    arrived: list[Request], b: EventBuilder | None = None, **fields: object
) -> tuple[Classified, Context]:
    wanted = request(0, 100, **fields)
    beside = Beside()
    beside.begun([*arrived, wanted])
    b = b or behind_others()
    _, timelines = b.walk(wanted)
    path = walk(timelines, wanted)
    ctx = Context(timelines, wanted, beside=beside)
    return classify(path, ctx), ctx


@given(st.data())
def test_what_is_not_looked_at_for_retries_has_none(data: st.DataObject) -> None:
    def one(k: int) -> Request:
        start = data.draw(st.integers(-15_000, 0))
        end = start + data.draw(st.integers(1, 3_000))
        made = attempt(
            k,
            start,
            end,
            data.draw(st.sampled_from([200, 200, 200, 404, 503])),
            left=data.draw(st.sampled_from([False, False, True])),
            trace_id=f"{data.draw(st.integers(0, 20)):032x}",
            trace_id_source=data.draw(st.sampled_from(["traceparent", "generated"])),
            request_id=data.draw(st.sampled_from(["", "a", "b"])),
        )
        return structs.replace(made, end_ns=0, outcome="open") if data.draw(st.booleans()) else made

    arrived = sorted((one(k) for k in range(data.draw(st.integers(0, 6)))), key=lambda r: r.start_ns)
    if not retries._may_retry(arrived):
        named, settled = retries._named(arrived)
        assert named == {}
        assert retries._bunched(arrived, settled) == {}


def behind_others() -> EventBuilder:
    """LOOP waits 10-60 for the CPU that a worker of its own service has."""
    return (
        EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=WORKER).into(60, LOOP, WORKER).out(110, LOOP)
    )


@pytest.mark.usefixtures("long_ago")
def test_waits_behind_work_that_was_sent_again_are_the_storm_s() -> None:
    found, ctx = storming(tried_again(20, 3))
    assert ms_of(found)["client.retry_storm"] == 50
    seen = retries.storm(ctx)
    assert seen is not None and seen.delay_ns == pytest.approx(1000 * MS)
    culprit = found.culprits["client.retry_storm"]
    assert (culprit.kind, culprit.name) == ("peer", "bench/1 /v1/completions")
    assert "arrivals per first attempt, 1000 ms after each failure" in culprit.detail


@pytest.mark.usefixtures("long_ago")
def test_a_loop_busy_with_it_counts_too() -> None:
    b = EventBuilder().into(-5, LOOP).recv(0, LOOP).send(100, LOOP).out(101, LOOP, nr=EPOLL_WAIT)
    found, _ = storming(tried_again(20, 3), b)
    assert ms_of(found) == {"client.retry_storm": 100}


@pytest.mark.usefixtures("long_ago")
def test_retries_that_name_themselves_need_no_bunching() -> None:
    arrived = [attempt(k, -9000 + 97 * k + 31 * (k % 7), -8900 + 97 * k, attempt=k % 3) for k in range(60)]
    _, ctx = storming(arrived)
    seen = retries.storm(ctx)
    assert seen is not None and seen.retries == 40


@pytest.mark.usefixtures("long_ago")
def test_the_same_trace_again_after_a_failure_is_a_retry() -> None:
    arrived = []
    for k in range(40):
        fields = {"trace_id": f"{k // 2:032x}", "trace_id_source": "traceparent"}
        at = -9000 + 211 * (k // 2) + (137 + 19 * (k % 5) if k % 2 else 0)
        arrived.append(attempt(k, at, at + 50, 200 if k % 2 else 503, **fields))
    found, ctx = storming(sorted(arrived, key=lambda r: r.start_ns))
    seen = retries.storm(ctx)
    assert seen is not None and (seen.retries, seen.failed) == (20, 20)
    assert "client.retry_storm" in found.causes


@pytest.mark.usefixtures("long_ago")
def test_failures_alone_are_no_storm() -> None:
    """Arrivals come as they like; that some follow a failure is chance."""
    arrived = [
        attempt(k, -9000 + 61.8 * k + (k * k * 7) % 59, -8950 + 61.8 * k, 503 if k % 3 else 200)
        for k in range(140)
    ]
    found, ctx = storming(sorted(arrived, key=lambda r: r.start_ns))
    assert retries.storm(ctx) is None
    assert "client.retry_storm" not in found.causes


@pytest.mark.usefixtures("long_ago")
def test_clockwork_arrivals_after_equal_time_outs_are_no_storm() -> None:
    arrived = [attempt(k, -9000 + 125 * k, -9000 + 125 * k + 500, left=True) for k in range(70)]
    _, ctx = storming(arrived)
    assert retries.storm(ctx) is None


@pytest.mark.usefixtures("long_ago")
def test_a_few_retries_under_load_are_no_storm() -> None:
    arrived = [attempt(k, -9000 + 60 * k, -8950 + 60 * k) for k in range(140)]
    arrived += [attempt(500 + k, -5000 + 700 * k, -4900 + 700 * k, attempt=1) for k in range(6)]
    found, ctx = storming(sorted(arrived, key=lambda r: r.start_ns))
    assert retries.storm(ctx) is None
    assert "6 of 147 arrivals" in checks(found, ctx)["client.retry_storm"]


@pytest.mark.usefixtures("long_ago")
def test_a_storm_does_not_explain_a_neighbour() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=HOG).into(60, LOOP, HOG).out(110, LOOP)
    found, _ = storming(tried_again(20, 3), b)
    assert ms_of(found)["cpu.runqueue"] == 50
    assert "client.retry_storm" not in found.causes


@pytest.mark.usefixtures("long_ago")
def test_a_storm_does_not_explain_the_request_s_own_sleep() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .out(10, LOOP, nr=230)
        .wake(60, LOOP, context=1)
        .into(60, LOOP)
        .out(110, LOOP)
    )
    found, _ = storming(tried_again(20, 3), b)
    assert ms_of(found)["work.timer"] == 50


@pytest.mark.usefixtures("long_ago")
def test_nobody_beside_it_is_no_storm() -> None:
    found, ctx = behind_others().classify(request(0, 100))
    assert (
        checks(found, ctx)["client.retry_storm"]
        == "none of 0 arrivals looks like a retry; 0 attempts had failed"
    )


def test_a_calm_before_the_storm_does_not_hide_it() -> None:
    calm = [attempt(5000 + k, -19_000 + 61 * k, -18_990 + 61 * k, agent="other/1") for k in range(250)]
    found, ctx = storming(sorted([*calm, *tried_again(32, 3)], key=lambda r: r.start_ns))
    assert retries.storm(ctx) is not None
    assert "client.retry_storm" in found.causes
    assert retries.tally(ctx).window_ns == 3100 * MS
