"""Bursts that slow requests trigger: when, of which process, one at a time; and their metrics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from whyspan.burst import files
from whyspan.burst.report import MallocRow
from whyspan.config import Burst, load_config
from whyspan.errors import ConfigError
from whyspan.model import Culprit, Finding
from whyspan.pipeline import bursts
from whyspan.pipeline.bursts import Bursts, summary
from whyspan_exporters.link import Count
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.snapshot import take
from whyspan_exporters.records import Counts, Status

from tests.bpf.waiting import until
from tests.unit.burst.test_burst_report import malloc_row, report

MakeFinding = Callable[..., Finding]

#: Stands for the worker: it writes what it was told to, and ends as it was told to.
STUB = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
{body}
"""


def stub(body: str) -> list[str]:
    return [sys.executable, "-c", STUB.format(body=body)]


def good(tmp_path: Path) -> list[str]:
    source = tmp_path / "given.json"
    files.write(source, report())
    return stub(f"out.write_bytes(pathlib.Path({str(source)!r}).read_bytes())")


def finish(b: Bursts, now_s: float = 1.0) -> None:
    """Tend it, on a clock that stands still, until it has ended."""

    def ended() -> bool:
        b.tend(now_s)
        return not b.tgid and not b._waiting

    until(ended, "the burst has ended")


SETTINGS = Burst(on_breach=("malloc",), min_interval_s=100)


@pytest.mark.parametrize(
    ("settings", "finding", "starts"),
    [
        (SETTINGS, {"cause": "lock.malloc"}, True),
        (SETTINGS, {"cause": "lock.framework"}, False),
        (SETTINGS, {"cause": "lock.malloc", "slow": False}, False),
        (SETTINGS, {"cause": "lock.malloc", "tgid": 9}, False),  # not watched
        (Burst(), {"cause": "lock.malloc"}, False),  # off
        (Burst(on_breach=("malloc",), causes=("lock",)), {"cause": "lock.framework"}, True),
        (Burst(on_breach=("malloc",), causes=("loc",)), {"cause": "lock.framework"}, False),
    ],
)
def test_what_triggers_one(
    make_finding: MakeFinding, tmp_path: Path, settings: Burst, finding: dict[str, object], starts: bool
) -> None:
    b = Bursts(settings, tmp_path, command=stub(""))
    f = make_finding(**finding)
    f.verdict.culprit = Culprit()
    b.consider(f, {100, 200}, 1.0)
    b.tend(1.0)
    assert bool(b.tgid) is starts
    b.close()


@pytest.mark.parametrize(("blamed", "measured"), [(200, 200), (300, 100), (0, 100)])
def test_the_blamed_process_is_measured_if_it_is_watched(
    make_finding: MakeFinding, tmp_path: Path, blamed: int, measured: int
) -> None:
    said = tmp_path / "said"
    b = Bursts(
        SETTINGS, tmp_path, command=stub(f"pathlib.Path({str(said)!r}).write_text(' '.join(sys.argv[1:]))")
    )
    f = make_finding(cause="lock.malloc")
    f.verdict.culprit = Culprit(kind="thread", tgid=blamed)
    b.consider(f, {100, 200}, 1.0)
    b.tend(1.0)
    finish(b)
    assert said.read_text().startswith(f"malloc --pid {measured} --seconds 2 --parent ")


def test_one_at_a_time_and_not_too_often(make_finding: MakeFinding, tmp_path: Path) -> None:
    b = Bursts(SETTINGS, tmp_path, command=good(tmp_path))
    f = make_finding(cause="lock.malloc")
    b.consider(f, {100}, 1.0)
    b.tend(1.0)
    first = b.tgid
    b.consider(f, {100}, 500.0)  # one is running
    b.tend(1.0)
    assert b.tgid in (first, 0)
    finish(b)
    for now_s, starts in ((100.9, False), (101.0, True)):
        b.consider(f, {100}, now_s)
        b.tend(now_s)
        assert bool(b.tgid) is starts
    finish(b, 101.0)
    assert b.new_counts() == {("malloc", "done"): 2}
    assert b.new_counts() == {}


def test_both_kinds_run_one_after_the_other(make_finding: MakeFinding, tmp_path: Path) -> None:
    b = Bursts(Burst(on_breach=("malloc", "syscalls", "malloc")), tmp_path, command=good(tmp_path))
    b.consider(make_finding(cause="lock.malloc"), {100}, 1.0)
    b.tend(1.0)
    finish(b)
    assert b.new_counts() == {("malloc", "done"): 1, ("syscalls", "done"): 1}


@pytest.mark.parametrize(
    ("body", "result", "reason"),
    [
        ("print('noise\\nthe reason\\x1b', file=sys.stderr); sys.exit(1)", "failed", "the reason\\x1b"),
        ("print('too much', file=sys.stderr); sys.exit(4)", "too dear", "too much"),
        ("", "failed", ""),  # no report
        ("out.write_text('{')", "failed", ""),
    ],
)
def test_one_that_comes_to_nothing(
    make_finding: MakeFinding, tmp_path: Path, body: str, result: str, reason: str
) -> None:
    b = Bursts(SETTINGS, tmp_path, command=stub(body))
    b.consider(make_finding(cause="lock.malloc"), {100}, 1.0)
    b.tend(1.0)
    finish(b)
    assert b.new_counts() == {("malloc", result): 1}
    last = b.state(2.0)["last"]
    assert (last["result"], last["reason"], last["file"]) == (result, reason, "")
    assert b.state(2.0)["malloc"] == []


def test_one_that_hangs_is_killed(make_finding: MakeFinding, tmp_path: Path) -> None:
    b = Bursts(SETTINGS, tmp_path, command=stub("sys.stdin.read(); import signal; signal.pause()"))
    b.consider(make_finding(cause="lock.malloc"), {100}, 1.0)
    b.tend(1.0)
    b.tend(62.9)
    assert b._running is not None
    assert b._running.process.poll() is None
    b.tend(63.0)  # its 2 s, and a minute
    b._running.process.wait(20)
    b.tend(63.0)
    assert b.new_counts() == {("malloc", "failed"): 1}


def test_close_ends_it(make_finding: MakeFinding, tmp_path: Path) -> None:
    b = Bursts(SETTINGS, tmp_path, command=stub("import signal; signal.pause()"))
    b.consider(make_finding(cause="lock.malloc"), {100}, 1.0)
    b.tend(1.0)
    b.close()
    assert b.tgid == 0
    b.close()


def test_figures_are_shown_for_a_while(make_finding: MakeFinding, tmp_path: Path) -> None:
    b = Bursts(SETTINGS, tmp_path, command=good(tmp_path))
    b.consider(make_finding(cause="lock.malloc"), {100}, 1.0)
    b.tend(1.0)
    finish(b)
    rows = b.state(2.0)["malloc"]
    assert rows[0] == {
        "service": "chat",
        "thread": "worker-N",
        "size_class": "128",
        "calls": 1009,
        "blocked_ns": 5_000_000,
        "mean_blocked_ns": 5_000_000 / 1009,
        "lock_waits": 7,
    }
    assert b.state(bursts.SHOWN_S + 1.1)["malloc"] == []
    assert b.state(bursts.SHOWN_S)["last"]["file"].endswith("-malloc-100.json")


def test_the_threads_of_a_pool_are_one_row_and_rows_are_bounded() -> None:
    rows: list[MallocRow] = [malloc_row(f"pool-{n}", 64, 1_000) for n in range(50)]
    rows += [malloc_row(chr(97 + n // 8) * 3, 1 << (4 + n % 8), 10 + n) for n in range(100)]
    out = summary(report(malloc=rows), "chat")
    assert len(out) == bursts.MAX_ROWS
    assert (out[0]["thread"], out[0]["calls"], out[0]["lock_waits"]) == ("pool-N", 50 * 1009, 50 * 7)
    assert (out[-1]["thread"], out[-1]["size_class"]) == ("other", "other")
    assert sum(r["calls"] for r in out) == 150 * 1009
    assert sum(r["blocked_ns"] for r in out) == sum(r.blocked_ns for r in rows)


def test_unknown_times_are_no_zeros() -> None:
    (row,) = summary(report(malloc=[malloc_row(timed=0, blocked=0, waits=0)]), "chat")
    assert (row["mean_blocked_ns"], row["lock_waits"], row["calls"]) == (None, None, 1009)


def test_metrics() -> None:
    figures = Figures()
    rows = summary(report(), "chat")
    junk = [3, {"service": None, "mean_blocked_ns": "many"}]
    figures.add(Status("i", {"bursts": {"malloc": [*rows, *junk]}}))
    figures.add(Counts("i", [Count("bursts", "malloc", "done", 3), Count("bursts", "malloc", "too dear", 1)]))
    found = {
        f.instrument.name: {tuple(p.labels.values()): p.value for p in f.points}
        for f in take(figures, 1).families
    }
    assert found["whyspan.burst.count"] == {("malloc", "done"): 3, ("malloc", "too dear"): 1}
    blocked = found["whyspan.burst.malloc.blocked"]
    assert blocked["chat", "worker-N", "128"] == pytest.approx(5e-3 / 1009)
    assert blocked["chat", "worker-N", "none"] == 0
    assert found["whyspan.burst.malloc.lock_waits"]["chat", "worker-N", "128"] == 7
    assert found["whyspan.burst.malloc.calls"]["chat", "idle", "1048576"] == 1009


def test_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whyspan.config.SYSTEM_PATH", Path("/nonexistent"))
    path = tmp_path / "whyspan.toml"
    path.write_text('[burst]\non_breach = ["malloc"]\nseconds = 3\n')
    assert load_config(path, {}).burst == Burst(on_breach=("malloc",), seconds=3)
    for text, says in (
        (
            'on_breach = ["heap"]',
            "burst: on_breach has 'heap', which is not one of malloc, samples, syscalls",
        ),
        ("seconds = 61", "burst.seconds: expected float <= 60.0"),
        ("min_interval_s = 0", "burst.min_interval_s: expected float >= 1.0"),
        ("second = 1", "unknown key burst.second; did you mean burst.seconds?"),
    ):
        path.write_text(f"[burst]\n{text}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(path, {})
        assert str(caught.value) == f"{path}: {says}"
