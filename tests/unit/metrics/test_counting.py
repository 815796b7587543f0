"""The engine counts every request that ends, whether it explains it or not."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import pytest
from whyspan.config import Objectives
from whyspan.engine import Engine, Settings
from whyspan.tally import BOUNDS_S, bucket

from tests.unit.enginelab import DECODE_MS, DECODES, PROMPT, T0, Lab, findings, prefill
from tests.unit.wire import SCHEMA, Wire


def engine(**over: Any) -> Engine:
    limits = Objectives(e2e_ms=100)
    return Engine(SCHEMA, Settings(objectives=lambda _: limits, instance="i", **over))


def test_all_requests_are_in_the_histograms_and_few_are_explained() -> None:
    w = Wire()
    for n in range(60):
        w.ask(10 * n, cookie=n).done(10 * n + 5, cookie=n)
        w.ask(10 * n, cookie=1000 + n).done(10 * n + 200, cookie=1000 + n)
    w.ask(0, cookie=5000).done(3, 503, cookie=5000)
    e = engine(explain_per_s=1, ordinary_per_s=0)
    found = [f for b in w.batches(2000) for f in e.feed(b)]
    assert len(found) < 10
    rows = {row[2]: row for row in e.tally.state(0)["latencies"]}
    assert set(rows) == {"", "503"}
    service, model, _, overflow, counts, sums = rows[""]
    assert (service, model, overflow) == ("svc", "", False)
    expected = [0] * (len(BOUNDS_S) + 1)
    expected[bucket(0.005)] = expected[bucket(0.2)] = 60
    assert counts[0] == expected
    assert sums[0] == pytest.approx(60 * 0.205)
    assert dict(e.tally.counts) == {
        ("request_codes", "svc", "ok/200"): 120,
        ("request_codes", "svc", "error/503"): 1,
        ("slo", "svc", "success/good"): 120,
        ("slo", "svc", "success/bad"): 1,
        ("slo", "svc", "e2e/good"): 60,
        ("slo", "svc", "e2e/bad"): 60,
    }


def test_a_request_is_counted_under_the_model_of_its_engine() -> None:
    lab = Lab().hello(T0 - 100, model={"name": "opt-125m"})
    lab.arrive(T0, 1)
    lab.done(T0 + 30, cookie=lab.fronts[1][0], seq=0)
    e = engine()
    findings(lab, T0 + 500, e=e)
    assert [row[:3] for row in e.tally.state(0)["latencies"]] == [["svc", "opt-125m", ""]]


def test_evenness_is_that_of_the_tokens_where_the_engine_tells() -> None:
    """Each answer of the other kind comes in one piece: without the engine nothing could be said of it."""
    lab = Lab().hello(T0 - 100)
    lab.serve(T0, 1)
    lab.serve(T0 + 100, 2)
    lab.arrive(T0 + 200, 3)
    begin, took = T0 + 202, (20.0, 10.0, 10.0, 200.0, 10.0)
    for n, ms in enumerate(took):
        kind: dict[str, Any] = {"decodes": [3]} if n else {"others": [prefill(3, PROMPT)]}
        lab.step(begin, begin + ms, **kind, finished=[3] if n == len(took) - 1 else [])
        begin += ms
    e = engine()
    findings(lab, T0 + 1000, e=e)
    gaps_s = [DECODE_MS / 1e3] * 2 * DECODES + [ms / 1e3 for ms in took[1:]]
    found = e.tally.state(int((T0 + 1000) * 1e6))["inter_token"]["svc"]
    assert found["mean_s"] == pytest.approx(fmean(gaps_s))
    assert found["stddev_s"] == pytest.approx(pstdev(gaps_s))
    assert found["stddev_s"] > 0.05
