"""The demo's judge: which requests are a fault's, which are healthy, which are neither."""

from __future__ import annotations

import pytest

from tests.demo.truth import TAIL_NS, Sent, Window, judge, percentile

MS = 1_000_000
S = 1_000 * MS
WINDOW = Window("quota", begin_ns=100 * S, on_ns=101 * S, off_ns=110 * S, end_ns=111 * S)


def sent(trace_id: str, start_ns: int, latency_ns: int, status: int = 200, error: str = "") -> Sent:
    return Sent(trace_id, start_ns, start_ns + latency_ns // 2, start_ns + latency_ns, status, error)


def healthy_before(count: int = 100) -> list[Sent]:
    return [sent(f"h{n}", n * S // 2, (100 + n % 10) * MS) for n in range(count)]


def ids(group: list[Sent]) -> list[str]:
    return [s.trace_id for s in group]


def test_members_started_while_the_fault_was_on() -> None:
    slow = [
        sent("injecting", 100 * S + 1, 500 * MS),
        sent("first", 101 * S, 500 * MS),
        sent("last", 110 * S - 1, 500 * MS),
        sent("removing", 110 * S, 500 * MS),
    ]
    judged = judge([*healthy_before(), *slow], [WINDOW])
    assert ids(judged.slowed["quota"]) == ["first", "last"]
    assert not set(ids(slow)) & set(ids(judged.healthy))


def test_slowed_means_above_the_healthy_p99() -> None:
    judged = judge(
        [*healthy_before(), sent("as usual", 102 * S, 109 * MS), sent("slow", 103 * S, 110 * MS)], [WINDOW]
    )
    assert judged.limit_ns == 109 * MS
    assert ids(judged.members["quota"]) == ["as usual", "slow"]
    assert ids(judged.slowed["quota"]) == ["slow"]


@pytest.mark.parametrize(
    ("start_ns", "latency_ns", "healthy"),
    [
        (99 * S, 100 * MS, True),
        (100 * S - 50 * MS, 100 * MS, False),  # overlaps the injection
        (111 * S + TAIL_NS - 1, 100 * MS, False),  # too soon after the removal
        (111 * S + TAIL_NS, 100 * MS, True),
    ],
)
def test_requests_at_the_edges(start_ns: int, latency_ns: int, healthy: bool) -> None:
    judged = judge([*healthy_before(), sent("edge", start_ns, latency_ns)], [WINDOW])
    assert ("edge" in ids(judged.healthy)) is healthy


def test_the_tail_lasts_until_the_last_request_of_the_fault_has_ended() -> None:
    backlog = sent("backlog", 109 * S, 5 * S)  # ends at 114 s
    judged = judge(
        [*healthy_before(), backlog, sent("soon", 114 * S, MS), sent("later", 115 * S, MS)], [WINDOW]
    )
    assert "soon" not in ids(judged.healthy)
    assert "later" in ids(judged.healthy)


def test_failed_requests_are_not_healthy_and_the_warm_up_is_left_out() -> None:
    requests = [
        *healthy_before(),
        sent("503", 60 * S, MS, status=503),
        sent("reset", 61 * S, MS, error="reset"),
    ]
    judged = judge(requests, [], not_before_ns=10 * S)
    assert not {"503", "reset"} & set(ids(judged.healthy))
    assert min(s.start_ns for s in judged.healthy) == 10 * S


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile(range(100), 0.99) == 99
    assert percentile([], 0.5) == 0
