"""``whyspan compare``: what got worse is named, chance is not, and the gate's exit status can be trusted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from whyspan.errors import ConfigError
from whyspan.model import EngineFacts, Finding
from whyspan.tally import BOUNDS_S, bucket
from whyspan.views import compare, resample, select
from whyspan.views.compare import Chosen
from whyspan.views.comparison import CompareView
from whyspan.views.select import Measured
from whyspan.views.weighing import Totals
from whyspan_exporters.records import Explained, finding_id
from whyspan_exporters.store import Store

from tests.unit.conftest import Run, build_finding
from tests.unit.viewlab import build

NOW = 1_800_000_000_000_000_000
SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests ask what is said of the figures; `test_resample` asks for the figures."""
    monkeypatch.setattr(resample.p_values, "__defaults__", (1100,))
    monkeypatch.setattr(resample.differences, "__defaults__", (300,))
    monkeypatch.setattr(resample.quantile_intervals, "__defaults__", (300,))


def found(
    n: int, ms: float, *, slow: bool = False, causes: dict[str, float] | None = None, **more: Any
) -> Finding:
    """Return a finding of a request that took *ms*."""
    f = build_finding(n, slow=slow, **more)
    f.request.end_ns = f.request.start_ns + int(ms * 1e6)
    f.request.first_ns = f.request.start_ns + int(ms * 0.4e6)
    f.wall_ns = int(ms * 1e6)
    f.causes = causes if causes is not None else {"work.cpu": ms}
    return f


def measured(finding: Finding) -> Measured:
    out = select.decode(msgspec.msgpack.encode(finding))
    assert out is not None
    return out


def chosen(findings: list[Finding], totals: dict[str, Totals] | None = None) -> Chosen:
    return Chosen(select.Selector(text="x"), range(len(findings)), [measured(f) for f in findings], totals)


def release(
    seed: int, count: int, throttled_ms: float = 0.0, errors: float = 0.0, first: int = 0
) -> list[Finding]:
    """Return requests of a release: some are throttled, some fail."""
    rng = random.Random(seed)
    out = []
    for n in range(first, first + count):
        causes = {"work.cpu": rng.lognormvariate(4.0, 0.2), "python.gc": rng.expovariate(1.0)}
        causes["cpu.throttled"] = rng.expovariate(1.0 / (5.0 + throttled_ms))
        bad = rng.random() < errors
        more: dict[str, Any] = {"status": 503, "outcome": "error"} if bad else {}
        out.append(found(n, sum(causes.values()), causes=causes, **more))
    return out


def test_the_cause_that_got_worse_is_named() -> None:
    view = compare.compare(chosen(release(1, 400)), chosen(release(2, 350, throttled_ms=20.0)))
    assert view.too_few == ""
    worst = view.causes[0]
    assert (worst.cause, worst.state) == ("cpu.throttled", "worse")
    assert 15.0 < worst.change.low < 20.0 < worst.change.high < 25.0
    assert worst.p < 0.001
    assert [c.state for c in view.causes[1:]] == ["same", "same"]
    gates = {g.key: g.state for g in view.gates}
    assert gates == {"latency_p99": "worse", "errors": "unclear"}  # 0 of 350 may yet be 1%


def test_a_release_against_itself_passes() -> None:
    view = compare.compare(chosen(release(1, 320)), chosen(release(2, 320)))
    assert {c.state for c in view.causes} == {"same"}
    assert all(g.state != "worse" for g in view.gates)


def test_what_got_better_is_no_reason_to_stop() -> None:
    view = compare.compare(chosen(release(1, 350, throttled_ms=20.0)), chosen(release(2, 350)))
    assert (view.causes[0].cause, view.causes[0].state) == ("cpu.throttled", "better")
    assert {g.key: g.state for g in view.gates}["latency_p99"] == "ok"


def test_more_errors_stop_a_release() -> None:
    view = compare.compare(chosen(release(1, 800)), chosen(release(2, 800, errors=0.03)))
    gates = {g.key: g for g in view.gates}
    assert gates["errors"].state == "worse"
    assert gates["errors"].change.low > 0
    assert view.b.failed == sum(f.request.status == 503 for f in release(2, 800, errors=0.03))
    one = release(2, 800)
    one[0].request.status, one[0].request.outcome = 503, "error"
    assert {g.key: g.state for g in compare.compare(chosen(release(1, 800)), chosen(one)).gates}[
        "errors"
    ] == "ok"


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (0, 400, "A has 0 answered requests in the store, 30 are needed"),
        (400, 29, "B has 29 answered requests in the store, 30 are needed"),
        (298, 400, "A has 298 answered requests, 299 are needed for P99"),
    ],
)
def test_too_few_requests_are_no_answer(a: int, b: int, says: str) -> None:
    view = compare.compare(chosen(release(1, a)), chosen(release(2, b)))
    assert view.too_few == says
    assert view.gates == []
    assert bool(view.causes) == (min(a, b) >= 30)  # which do without so many


def test_ordinary_requests_stand_for_those_that_were_not_kept() -> None:
    """All slow requests are in the store and one of 25 others: quantiles are those of all of them nevertheless."""
    rng = random.Random(5)
    everything = [rng.lognormvariate(4.0, 0.4) for _ in range(10_000)]
    kept = [found(n, ms, slow=ms > 120) for n, ms in enumerate(everything) if ms > 120 or n % 25 == 0]
    histogram = [0] * (len(BOUNDS_S) + 1)
    for ms in everything:
        histogram[bucket(ms / 1e3)] += 1
    totals = {"chat": Totals(histogram, 0)}
    view = compare.compare(chosen(kept, totals), chosen(kept, totals))
    assert view.weighted
    assert view.a.stands_for == pytest.approx(10_000, rel=0.001)
    in_order = sorted(everything)
    for m in view.metrics:
        if m.key.startswith("latency"):
            truth = in_order[int(float(m.label.rpartition("P")[2]) * 100)]
            assert m.a.value == pytest.approx(truth, rel=0.03), m.label
    naive = compare.compare(chosen(kept), chosen(kept))
    assert naive.metrics[0].a.value > 1.3 * in_order[5_000]  # what it would be without


def test_failures_are_weighed_by_how_many_there_were() -> None:
    findings = release(3, 400, errors=0.25)
    failed = sum(f.request.status == 503 for f in findings)
    histogram = [0] * (len(BOUNDS_S) + 1)
    for f in findings:
        histogram[bucket(f.wall_ns / 1e9)] += 10 if f.request.status == 200 else 2
    side = chosen(findings, {"chat": Totals(histogram, 2 * failed)})
    errors = compare.compare(side, side).metrics[-1]
    assert errors.key == "errors"
    ratio = 2 * failed / (2 * failed + 10 * (400 - failed))
    assert errors.a.value == pytest.approx(ratio, rel=0.02)
    assert errors.a.low < ratio < errors.a.high


def test_open_requests_are_not_compared() -> None:
    findings = release(1, 400)
    for f in findings[:50]:
        f.request.outcome = "open"
    assert compare.compare(chosen(findings), chosen(release(2, 400))).a.stored == 350


def test_selectors() -> None:
    f = found(1, 50, route="/v1/chat,x", tenant="acme")
    f.engine = EngineFacts(engine="vllm", version="0.11.0", model="llama")
    m = measured(f)

    def takes(text: str) -> bool:
        return select.parse(text, NOW).takes(m)

    assert takes("")
    assert takes("service=chat, version=0.11.*,model=llama,tenant=acme,status=2*")
    assert takes('"route=/v1/chat,x",method=POST')
    assert not takes("service=chat,version=0.10.*")
    assert not takes("pod=*x*")
    times = select.parse("since=2h,until=2027-01-15T07:30:00Z", NOW)
    assert times.since_unix_ns == NOW - 7200 * SECOND
    assert times.until_unix_ns == NOW - 1800 * SECOND
    assert select.parse("store=b.db", NOW).store == Path("b.db")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("servce=x", "unknown key servce; did you mean service?"),
        ("service", "'service' is not of the form key=value (in 'service')"),
        ("service=", "'service=' is not of the form key=value (in 'service=')"),
        ("service=a,service=b", "service is given twice (in 'service=a,service=b')"),
        ("host=x", "a store has the requests of one host: name another host's by store=FILE"),
        ("since=yesterday", "'yesterday' is not a time such as"),
        ("since=1h,until=2h", "since is not before until (in 'since=1h,until=2h')"),
        ("\x1b[2J=1", "unknown key \\x1b[2J;"),
        ("a=" + "x" * 5000, "a selector of more than 4096 characters"),
    ],
)
def test_a_wrong_selector_is_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select.parse(text, NOW)
    assert str(caught.value).startswith(says)


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line at `NOW`."""
    monkeypatch.setattr("whyspan.clock.now_unix_ns", lambda: NOW)
    return run


@pytest.fixture
def store(tmp_path: Path) -> Callable[[list[Finding], list[Finding]], Path]:
    """Write findings of the hour before the last, and of the last."""

    def write(before: list[Finding], after: list[Finding]) -> Path:
        path = tmp_path / "s.db"
        sink = Store(path, max_age_ns=10**18, max_bytes=64 << 20, max_pending=10_000, now=lambda: NOW)
        for hours, findings in ((2, before), (1, after)):
            for i, f in enumerate(findings):
                sink.emit([Explained(finding_id("i", f), NOW - hours * 3600 * SECOND + (i + 1) * SECOND, f)])
        assert sink.flush() == ""
        sink.close()
        return path

    return write


A, B = ("--a", "since=2h,until=1h"), ("--b", "since=1h")


def test_exit_status_and_words(run: Run, store: Callable[..., Path]) -> None:
    path = store(release(1, 400), release(2, 400, throttled_ms=30.0, first=1000))
    status, out, err = run("compare", *A, *B, "--store", path)
    assert (status, err) == (3, "")
    assert "A  since=2h,until=1h: 400 requests (0 slow, 0 failed), 2027-01-15 06:00:01 to" in out
    assert "B is worse: latency P99 is " in out
    assert "More time per request goes to cpu.throttled (+" in out
    assert "gate latency P99 +15.0 ms: +" in out
    assert "WORSE THAN THE LIMIT" in out
    assert "gate errors +0.80%: +0.00 points (95%: " in out
    assert "figures are of the stored ones" in out  # nobody counted the others
    assert run("compare", *A, *B, "--store", path, "--p99", "500ms")[0] == 0
    assert run("compare", *B[:1], A[1], *A[:1], B[1], "--store", path)[0] == 0  # the other way round
    view = msgspec.json.decode(run("compare", *A, *B, "--store", path, "--json")[1], type=CompareView)
    assert view.causes[0].cause == "cpu.throttled"
    assert view.gates[0].state == "worse"


def test_too_few_have_a_status_of_their_own(run: Run, store: Callable[..., Path]) -> None:
    path = store(release(1, 40), [])
    status, out, _ = run("compare", *A, *B, "--store", path)
    assert status == 4
    assert "Too few requests to tell: A has 40 answered requests, 299 are needed for P99." in out
    assert "B  since=1h: 0 requests (0 slow, 0 failed)\n" in out
    assert json.loads(run("compare", *A, *B, "--store", path, "--json")[1])["gates"] == []


def test_a_comparison_with_itself_is_refused(run: Run, store: Callable[..., Path]) -> None:
    path = store(release(1, 20), [])
    status, _, err = run("compare", "--a", "since=2h", "--b", "service=chat", "--store", path)
    assert status == 2
    assert err == "whyspan: A and B share 20 requests: separate them, as by since and until\n"


def test_wrong_limits_and_stores(run: Run, tmp_path: Path) -> None:
    assert run("compare", *A, *B, "--p99", "15")[0] == 2
    assert run("compare", *A, *B, "--errors", "x%")[0] == 2
    assert run("compare", *A)[0] == 2
    status, _, err = run("compare", "--a", f"store={tmp_path}/a.db", "--b", "since=1h")
    assert status == 1
    assert err.startswith(f"whyspan: there is no store at {tmp_path}/a.db yet")


def test_two_hosts_of_which_all_requests_were_counted(run: Run, tmp_path: Path) -> None:
    one = build(tmp_path / "one.db", 150, hours=0.5, now_unix_ns=NOW - 3600 * SECOND)
    two = build(tmp_path / "two.db", 150, hours=0.5, now_unix_ns=NOW, evil=True)
    status, out, err = run("compare", "--a", f"store={one.path}", "--b", f"store={two.path}")
    assert (status, err) == (0, ""), out
    assert "A  store=" in out
    assert re.search(r": 150 of \d{3} requests \(120 slow, ", out), out
    assert out.replace("\n", "").isprintable()


def test_only_the_newest_are_taken(run: Run, store: Callable[..., Path]) -> None:
    path = store(release(1, 300), release(2, 300, first=1000))
    view = json.loads(run("compare", *A, *B, "--store", path, "--json", "--limit", "100")[1])
    assert view["a"]["stored"] == view["b"]["stored"] == 100
    assert view["a"]["last_unix_ms"] == (NOW - 7200 * SECOND + 300 * SECOND) / 1e6
