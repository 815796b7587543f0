"""Counting of every request: buckets, objectives, evenness; pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.config import Objectives
from whyspan.model import Request
from whyspan.tally import BOUNDS_S, OVERFLOW, Series, Tally, bucket, per_chunk_s

MS = 1_000_000
NONE = Objectives()


def request(ms: float = 100, **changes: Any) -> Request:
    """A streamed answer of 11 chunks, the first after a fifth of the time."""
    start = 1_000_000_000
    usual: dict[str, Any] = {
        "trace_id": "a" * 32,
        "trace_id_source": "generated",
        "service": "chat",
        "tgid": 1,
        "start_tid": 1,
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "start_ns": start,
        "first_ns": start + int(ms * MS / 5),
        "end_ns": start + int(ms * MS),
        "chunks": 11,
    }
    return Request(**(usual | changes))


def counted(tally: Tally) -> dict[Series, tuple[dict[str, int], dict[str, float]]]:
    """By series, the number of values of each histogram and their sums in ms."""
    out = {}
    for service, model, error, overflow, counts, sums in tally.state(0)["latencies"]:
        names = ("duration", "ttft", "per_token")
        numbers = {n: sum(c) for n, c in zip(names, counts, strict=True)}
        totals = {n: round(s * 1e3, 6) for n, s in zip(names, sums, strict=True)}
        out[Series(service, model, error, overflow)] = numbers, totals
    return out


def slo(counts: Counter[Any]) -> dict[str, int]:
    return {label: n for (name, _, label), n in counts.items() if name == "slo"}


def test_the_bounds_rise_from_a_millisecond_to_ten_minutes() -> None:
    assert len(BOUNDS_S) == 24
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.001, 600)
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


@given(st.floats(0, 1e6))
def test_a_value_lies_within_the_bounds_of_its_bucket(seconds: float) -> None:
    n = bucket(seconds)
    assert n == len(BOUNDS_S) or seconds <= BOUNDS_S[n]
    assert n == 0 or seconds > BOUNDS_S[n - 1]


def test_a_request_is_in_all_three_histograms() -> None:
    tally = Tally()
    tally.add(request(), NONE, "opt")
    tally.add(request(300), NONE, "opt")
    assert counted(tally) == {
        Series("chat", "opt"): (
            {"duration": 2, "ttft": 2, "per_token": 2},
            {"duration": 400, "ttft": 80, "per_token": 32},  # 80 ms and 240 ms in 10 gaps
        )
    }
    assert tally.counts["request_codes", "chat", "ok/200"] == 2


@pytest.mark.parametrize(
    ("changes", "code", "error", "numbers"),
    [
        ({"chunks": 1}, "ok/200", "", (1, 1, 0)),
        ({"first_ns": 0, "chunks": 0}, "ok/200", "", (1, 0, 0)),
        ({"outcome": "error", "status": 404, "chunks": 1}, "error/404", "", (1, 1, 0)),
        ({"outcome": "error", "status": 429, "chunks": 1}, "error/429", "429", (1, 1, 0)),
        ({"outcome": "error", "status": 503, "chunks": 1}, "error/503", "503", (1, 1, 0)),
        ({"outcome": "reset", "ended_by": "client_close"}, "reset/200", "client_close", (1, 1, 1)),
        (
            {"outcome": "killed", "ended_by": "process_exit", "status": 0},
            "killed/0",
            "process_exit",
            (1, 1, 1),
        ),
        ({"status": 4711}, "ok/0", "", (1, 1, 1)),
    ],
)
def test_how_it_ended_decides(
    changes: dict[str, Any], code: str, error: str, numbers: tuple[int, int, int]
) -> None:
    tally = Tally()
    tally.add(request(**changes), NONE, "")
    ((series, (found, _)),) = counted(tally).items()
    assert (series.error, tuple(found.values())) == (error, numbers)
    assert tally.counts["request_codes", "chat", code] == 1
    assert slo(tally.counts) == {"success/bad" if error else "success/good": 1}


@pytest.mark.parametrize(
    "changes", [{"method": "GET"}, {"method": "HEAD"}, {"method": "OPTIONS"}, {"outcome": "lost"}]
)
def test_who_only_asks_and_whose_end_is_not_known_counts_as_a_request_alone(changes: dict[str, Any]) -> None:
    tally = Tally()
    tally.add(request(**changes), Objectives(e2e_ms=1), "")
    assert counted(tally) == {}
    assert {name for name, _, _ in tally.counts} == {"request_codes"}


@pytest.mark.parametrize(
    ("objectives", "changes", "expected"),
    [
        (NONE, {}, {"success/good": 1}),
        (Objectives(e2e_ms=100), {}, {"success/good": 1, "e2e/good": 1}),
        (Objectives(e2e_ms=99), {}, {"success/good": 1, "e2e/bad": 1}),
        (
            Objectives(ttft_ms=20, inter_token_ms=7.9),
            {},
            {"success/good": 1, "ttft/good": 1, "inter_token/bad": 1},
        ),
        (Objectives(inter_token_ms=8), {"chunks": 1}, {"success/good": 1}),
        # Failing fast is not being fast; failing late is being late.
        (Objectives(e2e_ms=100), {"outcome": "error", "status": 500}, {"success/bad": 1}),
        (Objectives(e2e_ms=99), {"outcome": "error", "status": 500}, {"success/bad": 1, "e2e/bad": 1}),
        # No byte of an answer at all: it waited as long as it lasted.
        (
            Objectives(ttft_ms=99),
            {"outcome": "reset", "ended_by": "timeout", "status": 0, "first_ns": 0, "chunks": 0},
            {"success/bad": 1, "ttft/bad": 1},
        ),
    ],
)
def test_objectives(objectives: Objectives, changes: dict[str, Any], expected: dict[str, int]) -> None:
    tally = Tally()
    tally.add(request(**changes), objectives, "")
    assert slo(tally.counts) == expected


def test_series_and_codes_are_bounded_and_nothing_is_lost() -> None:
    tally = Tally()
    for n in range(1000):
        tally.add(request(service=f"s{n}", status=100 + n % 500), NONE, f"m{n % 7}")
    found = counted(tally)
    assert len(found) == 65
    assert sum(numbers["duration"] for numbers, _ in found.values()) == 1000
    assert found[OVERFLOW][0]["duration"] == 936
    codes = {key: n for key, n in tally.counts.items() if key[0] == "request_codes"}
    assert len(codes) == 201
    assert sum(codes.values()) == 1000
    assert codes["request_codes", "", "other"] == 800


def test_evenness_is_of_the_last_minute_and_weighted_by_chunks() -> None:
    tally = Tally()
    first = request(100, end_ns=1_000_000_000 + 100 * MS)
    tally.add(first, NONE, "")
    assert tally.state(first.end_ns)["inter_token"] == {}  # one request has no deviation
    tally.add(request(100, chunks=21, first_ns=1_000_000_000), NONE, "")  # 20 gaps of 5 ms
    found = tally.state(first.end_ns)["inter_token"]["chat"]
    # 10 gaps of 8 ms and 20 of 5 ms: mean 6, variance (10·4 + 20·1)/30 = 2
    assert found["mean_s"] == pytest.approx(0.006)
    assert found["stddev_s"] == pytest.approx(0.002**0.5 * 0.001**0.5)
    assert found["jitter"] == pytest.approx(found["stddev_s"] / 0.006)
    assert tally.state(first.end_ns + 61_000 * MS)["inter_token"] == {}


def test_evenness_forgets_what_failed() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(request(outcome="reset", ended_by="timeout"), NONE, "")
    assert tally.state(1_000_000_000)["inter_token"] == {}


@pytest.mark.parametrize("changes", [{"chunks": 1}, {"first_ns": 0}, {"first_ns": 2_000_000_000}])
def test_an_answer_in_one_piece_has_no_time_per_chunk(changes: dict[str, Any]) -> None:
    assert per_chunk_s(request(**changes)) == -1


def test_the_engines_word_on_tokens_counts_instead_of_chunks() -> None:
    tally = Tally()
    tally.add(request(chunks=1), NONE, "", [0.01, 0.03])
    tally.add(request(), NONE, "", [0.02])
    assert counted(tally)[Series("chat")][0]["per_token"] == 1  # the histogram is of answers in chunks
    found = tally.state(1_000_000_000)["inter_token"]["chat"]
    assert found["mean_s"] == pytest.approx(0.02)
    assert found["stddev_s"] == pytest.approx((2 * 0.01**2 / 3) ** 0.5)
