"""``whyspan slo suggest``: quantiles of all requests, placed by those stored."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan import cli, objectives
from whyspan.config import load_config
from whyspan.model import Finding
from whyspan.tally import BOUNDS_S, NAMES, bucket
from whyspan_exporters.link import Count
from whyspan_exporters.records import Counts, Explained, Status, finding_id
from whyspan_exporters.store import Store

MakeFinding = Callable[..., Finding]
Run = Callable[..., "tuple[int, str, str]"]
START = 1_767_323_045_678_000_000
WIDTH = len(BOUNDS_S) + 1
EVIL = "\x1b[2Jchat"


def histogram(*seconds: float) -> list[int]:
    counts = [0] * WIDTH
    for s in seconds:
        counts[bucket(s)] += 1
    return counts


def exact(values: list[float], quantile: float) -> float:
    return sorted(values)[math.ceil(quantile * len(values)) - 1]


@given(st.lists(st.floats(1e-4, 590.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_all_stored_is_exact(values: list[float], quantile: float) -> None:
    assert objectives.quantile_s(histogram(*values), values, quantile) == exact(values, quantile)


@given(st.lists(st.floats(1e-4, 590.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_none_stored_is_in_the_right_bucket(values: list[float], quantile: float) -> None:
    found = objectives.quantile_s(histogram(*values), (), quantile)
    assert bucket(found) == bucket(exact(values, quantile))


def test_slow_requests_do_not_count_twice() -> None:
    """All slow ones are stored and few of the others: the quantile is still that of all."""
    quick, slow = [0.12] * 990, [7.0] * 10
    stored = [0.12] * 3 + slow
    assert objectives.quantile_s(histogram(*quick, *slow), stored, 0.99) == 0.12
    assert objectives.quantile_s(histogram(*quick, *slow), stored, 0.995) == 7.0


def test_above_the_last_bound() -> None:
    assert objectives.quantile_s(histogram(700.0), (), 0.99) == BOUNDS_S[-1]
    assert objectives.quantile_s(histogram(700.0), (700.0,), 0.99) == 700.0


def test_of_a_histogram_alone() -> None:
    assert objectives.quantile_ms(histogram(), 0.5) is None
    assert objectives.quantile_ms((), 0.5) is None
    assert objectives.quantile_ms(histogram(700.0), 0.5) == BOUNDS_S[-1] * 1e3


@pytest.mark.parametrize(
    ("ms", "rounded"),
    [(123.4, 130), (130.0, 130), (99.1, 100), (0.0123, 0.013), (1.0, 1), (0.0, 0), (1001, 1100)],
)
def test_two_digits_up(ms: float, rounded: float) -> None:
    assert objectives.round_up(ms) == rounded


@given(st.floats(1e-3, 1e7))
def test_rounding_never_goes_below(ms: float) -> None:
    rounded = objectives.round_up(ms)
    assert ms * (1 - 1e-9) <= rounded <= ms * 1.1 * (1 + 1e-9)


def test_enough() -> None:
    def suggest(n: int) -> objectives.Latency:
        return objectives.latency("e2e_ms", histogram(*[0.2] * n), (), 0.99, 1.1)

    assert [suggest(999).enough, suggest(1000).enough] == [False, True]


@pytest.mark.parametrize(("good", "bad", "rate"), [(999, 1, 0.999), (1, 0, 0.9999), (1, 9, 0.0), (0, 0, 0.0)])
def test_success(good: int, bad: int, rate: float) -> None:
    assert objectives.success(good, bad) == rate


@pytest.fixture
def store(tmp_path: Path, make_finding: MakeFinding) -> Path:
    """Two collectors' worth of a service, one of them gone long ago; failures; a service with an odd name."""
    path = tmp_path / "s.db"
    sink = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: START)

    def latencies(service: str, seconds: float, n: int, error: str = "") -> list[object]:
        rows = [histogram(*[seconds] * n), histogram(*[seconds / 10] * n), histogram(*[seconds / 100] * n)]
        return [service, "m", error, False, rows, [0.0] * len(NAMES)]

    finding = make_finding()
    sink.emit(
        [
            Explained(finding_id("i", finding), START, finding),
            Status("one", {"latencies": [latencies("chat", 0.2, 600), latencies("chat", 50.0, 90, "500")]}),
            Status(
                "two",
                {"latencies": [latencies("chat", 0.4, 600), latencies(EVIL, 0.2, 1), "junk", ["short"]]},
            ),
            Status("three", {}),
            Counts("one", [Count("slo", "chat", "e2e/good", 500), Count("slo", "chat", "success/good", 600)]),
            Counts(
                "two",
                [
                    Count("slo", "chat", "e2e/bad", 100),
                    Count("slo", "chat", "success/good", 590),
                    Count("slo", "chat", "success/bad", 10),
                ],
            ),
        ]
    )
    sink.flush()
    sink.close()
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.main([str(a) for a in args])
        out = capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return exited.value.code, out.out, out.err

    return run


def test_json(store: Path, tmp_path: Path, run: Run) -> None:
    config = tmp_path / "whyspan.toml"
    config.write_text("[slo]\ne2e_ms = 250\n")
    code, out, _ = run("slo", "suggest", "--store", store, "--config", config, "--service", "chat", "--json")
    assert code == 0
    (entry,) = json.loads(out)
    e2e, ttft, inter_token = entry["objectives"]
    assert (e2e["requests"], e2e["enough"]) == (1200, True)
    assert 250 < e2e["observed_ms"] <= 500  # the bucket of 0.4 s
    assert e2e["suggested_ms"] >= e2e["observed_ms"] * 1.1
    assert (e2e["current_ms"], e2e["current_kept"]) == (250, 500 / 600)
    assert ttft["current_ms"] is None
    assert inter_token["key"] == "inter_token_ms"
    assert (entry["success"], entry["suggested_success"]) == (1190 / 1200, 0.99)


def test_what_is_printed_is_a_configuration(store: Path, tmp_path: Path, run: Run) -> None:
    code, out, _ = run("slo", "suggest", "--store", store)
    assert code == 0
    assert "\x1b" not in out
    table, _, toml = out.partition("# for whyspan.toml\n")
    assert "1200" in table
    assert "1 (few)" in table
    assert tomllib.loads(toml)["slo"]["services"][EVIL]
    config = tmp_path / "whyspan.toml"
    config.write_text(toml)
    assert load_config(config, {}).slo.objectives("chat").e2e_ms > 400


def test_quantile_and_headroom(store: Path, run: Run) -> None:
    def suggested(*args: object) -> float:
        _, out, _ = run("slo", "suggest", "--store", store, "--service", "chat", "--json", *args)
        return float(json.loads(out)[0]["objectives"][0]["suggested_ms"])

    assert suggested("--quantile", 0.5) < suggested() < suggested("--headroom", 2)
    code, _, err = run("slo", "suggest", "--store", store, "--quantile", "1")
    assert code == 2
    assert "quantile" in err


def test_nothing_known(store: Path, tmp_path: Path, run: Run) -> None:
    assert run("slo", "suggest", "--store", store, "--service", "none")[1] == "no requests of 'none'\n"
    empty = tmp_path / "empty.db"
    Store(empty, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: START).close()
    assert run("slo", "suggest", "--store", empty)[:2] == (0, "no requests\n")
    assert run("slo", "suggest", "--store", empty, "--json")[:2] == (0, "[]\n")
    code, _, err = run("slo", "suggest", "--store", tmp_path / "missing.db")
    assert code != 0
    assert "no store" in err
