"""``whyspan slow`` and ``whyspan explain`` on a store with known findings."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan import cli
from whyspan.cli import _timeline
from whyspan.model import Culprit, Finding, RuledOut, Segment
from whyspan_exporters.records import Explained, finding_id
from whyspan_exporters.store import Store

MakeFinding = Callable[..., Finding]
Run = Callable[..., "tuple[int, str, str]"]

# 2026-01-02T03:04:05.678Z
START = 1_767_323_045_678_000_000
EVIL = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e"

GOLDEN = """\
POST /v1/completions  200  service chat  2026-01-02T03:04:05.678Z
trace 00000000000000000000000000000001 (generated)  request id req-1
100.0 ms, first byte after 40.0 ms, 7 chunks, 700 bytes, 100.0% accounted for

Throttled for 33 ms by the quota of /demo/limited.
  cause cpu.throttled, excess 33.4 ms (91% of all excess), confidence 0.80, phase ttft
  culprit   cgroup /demo/limited (process 7, thread 8): quota
  evidence  2 throttled periods
  not       cpu.runqueue: no wait without throttling
  fix       Raise the quota.

  cause                                  ms  usual ms (of 50)
  cpu.throttled                       33.40  0.00
  work.cpu                            33.30  30.00
  work.timer                          33.30  33.00

     at ms     for ms
      0.00      33.33  ████████                  running    work.cpu                   worker-0 [100]
     33.33      33.33          ████████          throttled  cpu.throttled              worker-1 [101] quota 20 ms of 100 ms
     66.67      33.33                  ████████  blocked    work.timer                 worker-2 [102]
"""  # noqa: E501


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Path]:
    """Write findings to a new store, one second apart, and return its path."""

    def write(*findings: Finding) -> Path:
        path = tmp_path / "s.db"
        sink = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: START)
        sink.emit(
            [Explained(finding_id("i", f), START + i * 10**9, f) for i, f in enumerate(findings)],
        )
        assert sink.flush() == ""
        sink.close()
        return path

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line; returns exit status, standard output and standard error."""
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    monkeypatch.setenv("COLUMNS", "160")

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return call


def test_explain_golden(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    path = store(make_finding(1, request_id="req-1"))
    for name in ("0" * 31 + "1", "0000", "req-1", "i-c1-1"):
        status, out, err = run("explain", name, "--store", path)
        assert (status, err) == (0, "")
        assert re.sub(r" +$", "", out, flags=re.M) == re.sub(r" +$", "", GOLDEN, flags=re.M)


def test_slow_table(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    path = store(
        make_finding(1, trace_id=f"{'00abcdef':0<32}"),
        make_finding(2, slow=False),
        make_finding(3, service="b"),
    )
    status, out, _ = run("slow", "--store", path)
    assert status == 0
    lines = [line.split() for line in out.splitlines() if "01-02" in line]
    assert [line[2] for line in lines] == ["b", "chat"]  # newest first
    row = "01-02 03:04:05 chat POST /v1/completions 200 100.0 40.0 ttft cpu.throttled 33.4 91% 0.80"
    assert lines[1] == [*row.split(), "/demo/limited", "00abcdef"]
    assert len(run("slow", "--store", path, "--all")[1].splitlines()) == len(out.splitlines()) + 1
    assert "chat" not in run("slow", "--store", path, "--service", "b")[1]
    assert run("slow", "--store", path, "--cause", "gpu")[1] == "no slow or failed requests\n"
    assert run("slow", "--store", path, "--since", "1s")[1] == "no slow or failed requests\n"


def failures(make_finding: MakeFinding) -> list[Finding]:
    """Return a slow, an ordinary, a refused, a slow and cut, and a killed request."""
    cut = {"outcome": "reset", "ended_by": "client_close"}
    killed = {"outcome": "killed", "ended_by": "process_exit", "exit_code": 9, "status": 0}
    found = [
        make_finding(1),
        make_finding(2, slow=False),
        make_finding(3, slow=False, status=429, outcome="error", ended_by="server"),
        make_finding(4, **cut),
        make_finding(5, slow=False, head_ns=0, first_ns=0, **killed),
    ]
    found[2].verdict.sentence = "Failed with 429 after 100 ms; no cause takes more time than usual."
    return found


def test_failures_are_listed_with_how_they_ended(
    run: Run, store: Callable[..., Path], make_finding: MakeFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(*failures(make_finding))

    def listed(*options: str) -> list[tuple[int, str, str, str]]:
        found = json.loads(run("slow", "--json", "--store", path, *options)[1])
        return [(f["status"], f["outcome"], f["ended_by"], f["verdict"]["cause"]) for f in found[::-1]]

    slow = (200, "ok", "", "cpu.throttled")
    refused = (429, "error", "server", "unknown")
    cut = (200, "reset", "client_close", "cpu.throttled")
    killed = (0, "killed", "process_exit", "unknown")
    assert listed() == [slow, refused, cut, killed]
    assert listed("--failed") == listed("--failed", "--all") == [refused, cut, killed]
    assert listed("--no-failed") == [slow]
    assert listed("--no-failed", "--all") == [slow, (200, "ok", "", "unknown")]
    assert run("slow", "--failed", "--store", path, "--service", "x")[1] == "no failed requests\n"

    def rows() -> list[list[str]]:
        out = run("slow", "--store", path)[1]
        return [line.split() for line in out.splitlines() if "01-02" in line][::-1]

    assert [row[5] for row in rows()] == ["200", "429", "reset", "killed"]
    monkeypatch.setattr("whyspan.cli._options._PIPE_WIDTH", 80)
    assert [row[4:6] for row in rows()][1:] == [
        ["429:", "unknown"],
        ["reset:", "cpu.throttl…"],
        ["killed:", "unknown"],
    ]


def test_explain_shows_the_ending(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    path = store(*failures(make_finding))
    out = run("explain", "i-c3-3", "--store", path)[1]
    assert out.startswith("POST /v1/completions  429  service chat")
    assert "\nFailed with 429 after 100 ms; no cause takes more time than usual.\n  cause unknown," in out
    assert "Not slow" not in out
    assert run("explain", "i-c4-4", "--store", path)[1].startswith(
        "POST /v1/completions  200 reset (client_close)  service"
    )
    assert "  killed (process_exit)  service" in run("explain", "i-c5-5", "--store", path)[1]
    request = json.loads(run("explain", "i-c5-5", "--json", "--store", path)[1])["request"]
    assert (request["outcome"], request["ended_by"], request["exit_code"]) == ("killed", "process_exit", 9)


def test_a_store_of_before_is_read(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    path = store(make_finding(1))
    with sqlite3.connect(path) as db:
        (blob,) = db.execute("SELECT finding FROM findings").fetchone()
        finding = msgspec.msgpack.decode(blob)
        for new in ("ended_by", "exit_code", "head", "left_ns"):
            del finding["request"][new]
        db.execute("UPDATE findings SET finding = ?", (msgspec.msgpack.encode(finding),))
    assert run("explain", "0000", "--store", path)[0] == 0
    (entry,) = json.loads(run("slow", "--json", "--store", path)[1])
    assert entry["ended_by"] == ""


def test_slow_json_is_the_contract(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    path = store(make_finding(1), make_finding(2, first_ns=0, status=0))
    newest, oldest = json.loads(run("slow", "--store", path, "--json")[1])
    assert oldest == {
        "trace_id": f"{1:032x}",
        "trace_id_source": "generated",
        "service": "chat",
        "start": "2026-01-02T03:04:05.678Z",
        "latency_ms": 100.0,
        "ttft_ms": 40.0,
        "status": 200,
        "outcome": "ok",
        "ended_by": "",
        "phase": "ttft",
        "engine_phase": "",
        "engine_request_id": "",
        "verdict": {
            "cause": "cpu.throttled",
            "excess_ms": 33.4,
            "share": 0.91,
            "confidence": 0.8,
            "culprit": {
                "kind": "cgroup",
                "name": "/demo/limited",
                "tgid": 7,
                "tid": 8,
                "detail": "quota",
                "trace_id": "",
                "span_id": "",
            },
        },
        "accounted_ratio": 1.0,
        "lost_events": 0,
    }
    assert (newest["ttft_ms"], newest["status"]) == (None, 0)
    assert json.loads(run("slow", "--store", path, "--json", "--service", "none")[1]) == []


def test_explain_json_is_the_contract(
    run: Run, store: Callable[..., Path], make_finding: MakeFinding
) -> None:
    finding = make_finding(1)
    document = json.loads(run("explain", "0000", "--json", "--store", store(finding))[1])
    assert list(document) == [
        "request",
        "wall_ns",
        "accounted_ns",
        "segments",
        "causes",
        "baseline",
        "verdict",
        "ruled_out",
        "process",
        "phases",
        "engine",
        "stacks",
        "snapshots",
    ]
    assert (document["phases"], document["engine"]) == ([], None)
    assert document["request"]["start"] == "2026-01-02T03:04:05.678Z"
    assert document["request"]["trace_id"] == f"{1:032x}"
    assert document["segments"][1] == {
        "start_ns": finding.segments[1].start_ns,
        "end_ns": finding.segments[1].end_ns,
        "tgid": 100,
        "tid": 101,
        "thread": "worker-1",
        "state": "throttled",
        "cause": "cpu.throttled",
        "detail": "quota 20 ms of 100 ms",
        "inferred": False,
    }
    assert sum(s["end_ns"] - s["start_ns"] for s in document["segments"]) == document["wall_ns"]
    assert document["ruled_out"] == [{"cause": "cpu.runqueue", "check": "no wait without throttling"}]
    assert document["verdict"]["sentence"] == finding.verdict.sentence
    assert document["causes"] == finding.causes


def test_ids_that_do_not_decide(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    path = store(make_finding(1, trace_id=f"{'aaaa1':0<32}"), make_finding(2, trace_id=f"{'aaaa2':0<32}"))
    status, out, err = run("explain", "aaaa", "--store", path)
    assert (status, out) == (1, "")
    assert err == f"whyspan: aaaa is ambiguous: {'aaaa1':0<32}, {'aaaa2':0<32}\n"
    assert run("explain", "AAAA2", "--store", path)[0] == 0
    for name in ("aaa", "aaaa3", "x" * 40, "%", ""):
        status, out, err = run("explain", name, "--store", path)
        assert (status, out) == (1, "")
        assert err.startswith(f"whyspan: no request {name}: ")


def test_several_requests_of_one_trace(
    run: Run, store: Callable[..., Path], make_finding: MakeFinding
) -> None:
    fast, slow = (
        make_finding(1, trace_id="ab" * 16, route="/fast", slow=False),
        make_finding(2, trace_id="ab" * 16),
    )
    status, out, err = run("explain", "abab", "--store", store(fast, slow))
    assert status == 0
    assert out.startswith("POST /v1/completions")
    assert err == "whyspan: the slowest of 2 requests of this trace; others: i-c1-1\n"


def test_hostile_names_reach_the_terminal_disarmed(
    run: Run, store: Callable[..., Path], make_finding: MakeFinding
) -> None:
    finding = make_finding(
        1,
        service=EVIL,
        route=EVIL,
        method=EVIL,
        request_id=EVIL,
        trace_id=EVIL,
        trace_id_source=EVIL,
        outcome=EVIL,
    )
    verdict = finding.verdict
    verdict.cause = verdict.sentence = verdict.fix = finding.phase = EVIL
    verdict.evidence = [EVIL]
    verdict.culprit = Culprit(kind=EVIL, name=EVIL, detail=EVIL)
    finding.ruled_out = [RuledOut(EVIL, EVIL)]
    finding.causes, finding.baseline = {EVIL: 1.0}, {EVIL: 1.0}
    for segment in finding.segments:
        segment.thread = segment.state = segment.cause = segment.detail = EVIL
    path = store(finding)
    shown = 0
    for args in (
        ("slow",),
        ("explain", EVIL),
        ("slow", "--json"),
        ("explain", EVIL, "--json"),
        ("explain", EVIL + "x"),
    ):
        _, out, err = run(*args, "--store", path)
        text = (out + err).replace("\n", "")
        assert text.isprintable(), text
        shown += "[red]" in text
    assert shown >= 3  # rich did not take it for markup


def test_no_store_yet_is_one_clear_line(run: Run, tmp_path: Path) -> None:
    for args in (("slow",), ("explain", "abcd")):
        status, out, err = run(*args, "--store", tmp_path / "none.db")
        assert (status, out) == (1, "")
        assert err.startswith(f"whyspan: there is no store at {tmp_path}/none.db yet")
        assert err.count("\n") == 1


def test_the_configured_store_is_read(
    run: Run, store: Callable[..., Path], make_finding: MakeFinding, tmp_path: Path
) -> None:
    path = store(make_finding(1))
    config = tmp_path / "c.toml"
    config.write_text(f'[store]\npath = "{path}"\n')
    assert run("explain", "0000", "--config", config)[0] == 0
    config.write_text("[stor]\n")
    assert run("slow", "--config", config) == (
        2,
        "",
        f"whyspan: {config}: unknown key stor; did you mean store?\n",
    )


def test_usage(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert {"run", "slow", "explain"} <= {
        line.split()[0] for line in out.splitlines() if line.startswith("  ")
    }
    assert run("--version")[1].startswith("whyspan, version ")
    assert run("nope")[0] == 2
    assert run("slow", "--since", "yesterday")[0] == 2


def test_not_slow_request(run: Run, store: Callable[..., Path], make_finding: MakeFinding) -> None:
    out = run("explain", "0000", "--store", store(make_finding(1, slow=False)))[1]
    assert "Not slow: sampled for the baseline." in out


SEGMENTS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 3)), max_size=400)


@given(SEGMENTS, st.integers(1, 40))
def test_timeline_is_short_ordered_and_complete(pieces: list[tuple[int, int]], max_rows: int) -> None:
    segments, at = [], 0
    for length, kind in pieces:
        segments.append(
            Segment(
                start_ns=at,
                end_ns=at + length,
                tgid=1,
                tid=kind,
                thread="t",
                state="running",
                cause="work.cpu",
            )
        )
        at += length
    rows = _timeline.coalesce(_timeline.merge(segments), max_rows)
    assert len(rows) <= max_rows
    assert sum(r.pieces for r in rows) == len(segments)
    edges = [0, *(r.end_ns for r in rows)]
    assert [r.start_ns for r in rows] == edges[:-1]
    assert edges[-1] == at
    assert len(_timeline.lines(segments, 0, at)) <= _timeline.MAX_ROWS


def test_long_pieces_stay_visible(make_finding: MakeFinding) -> None:
    segments = make_finding(1, segments=999).segments
    start = segments[0].start_ns
    long = Segment(
        start_ns=segments[-1].end_ns,
        end_ns=segments[-1].end_ns + 10**9,
        tgid=1,
        tid=1,
        thread="gc",
        state="running",
        cause="python.gc",
    )
    lines = _timeline.lines([*segments, long], start, long.end_ns - start)
    assert len(lines) <= 30
    assert "python.gc" in lines[-1]
    assert "1000.00" in lines[-1]
    assert any("short pieces" in line for line in lines)


def test_narrow_terminals_keep_what_matters(
    run: Run, store: Callable[..., Path], make_finding: MakeFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whyspan.cli._options._PIPE_WIDTH", 80)
    out = run("slow", "--store", store(make_finding(1)))[1]
    assert max(map(len, out.splitlines())) <= 80
    (row,) = [line.split() for line in out.splitlines() if "01-02" in line]
    assert row == ["01-02", "03:04:05", "chat", "100.0", "cpu.throttled", "/demo/limited", "00000000"]
