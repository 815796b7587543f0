"""The arithmetic of the paired measurement: a known ratio is found, and its interval holds it."""

from __future__ import annotations

import math
import random

import pytest

from tests.bench.vllm_cost import chunks_in, ratio_of, shares


def test_a_constant_ratio_has_an_interval_of_no_width() -> None:
    ratio = ratio_of([(100.0, 98.0), (50.0, 49.0), (10.0, 9.8)])
    assert ratio.value == pytest.approx(0.98)
    assert ratio.low == pytest.approx(0.98) and ratio.high == pytest.approx(0.98)
    assert ratio.pairs == 3


def test_the_interval_holds_the_truth_about_nineteen_times_in_twenty() -> None:
    rng = random.Random(7)
    held = 0
    for _ in range(400):
        pairs = [(100 * math.exp(rng.gauss(0, 0.05)), 97 * math.exp(rng.gauss(0, 0.05))) for _ in range(60)]
        ratio = ratio_of(pairs)
        held += ratio.low <= 0.97 <= ratio.high
    assert 0.92 <= held / 400 <= 0.98


def test_one_pair_has_no_interval() -> None:
    assert ratio_of([(1.0, 2.0)]).high == math.inf


def test_tokens_of_a_window_are_shared_out_by_time() -> None:
    records = [
        {"first_ns": 100, "end_ns": 200, "chunks": 10},
        {"first_ns": 150, "end_ns": 350, "chunks": 20},
        {"first_ns": 0, "end_ns": 90, "chunks": 5},
        {"first_ns": 0, "end_ns": 0, "chunks": 0},  # refused
    ]
    assert chunks_in(records, 150, 250) == pytest.approx(5 + 10)
    whole = chunks_in(records, 0, 150) + chunks_in(records, 150, 400)
    assert whole == pytest.approx(35)


def test_each_probe_s_share_of_the_server_is_told() -> None:
    probes = {
        "sched": {"hits_per_s": 12345, "ns_per_hit": 300, "cores": 0.0037},
        "fds": {"hits_per_s": 7, "ns_per_hit": 900, "cores": 0.0},
    }
    lines = shares({"probes": probes, "server_cores": 2.0, "agent_cores": 0.01})
    assert [line.split() for line in lines[1:]] == [
        ["sched", "12,345", "300", "0.370%", "0.185%"],
        ["fds", "7", "900", "0.000%", "0.000%"],
        ["agent", "1.000%", "0.500%"],
    ]
    assert len({len(line) for line in lines}) == 1
