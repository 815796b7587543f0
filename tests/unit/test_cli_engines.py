"""What an engine said, on the command line: ``whyspan engines``, and its part in ``slow`` and ``explain``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whyspan import cli
from whyspan.clock import now_unix_ns
from whyspan.model import Culprit, EngineFacts, Finding, PhaseTime
from whyspan_exporters.records import Explained, Status, finding_id
from whyspan_exporters.store import Store

MakeFinding = Callable[..., Finding]
Run = Callable[..., "tuple[int, str, str]"]
Write = Callable[..., Path]

START = 1_767_323_045_678_000_000
EVIL = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e"
MS = 1_000_000
PHASES = {"frontend": (0, 2), "handover": (2, 3), "queue": (3, 60), "prefill": (60, 70), "decode": (70, 100)}


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


@pytest.fixture
def store(tmp_path: Path) -> Write:
    """Write findings, or what the collector says of itself, to a new store and return its path."""

    def write(*findings: Finding, status: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "s.db"
        sink = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=now_unix_ns)
        sink.emit([Explained(finding_id("i", f), START + i * 10**9, f) for i, f in enumerate(findings)])
        if status is not None:
            sink.emit([Status("i", status)])
        sink.close()
        return path

    return write


def served(finding: Finding, **facts: Any) -> Finding:
    """The finding, in place, with what an engine says of its request."""
    start = finding.request.start_ns
    finding.phases = [PhaseTime(n, start + a * MS, start + b * MS) for n, (a, b) in PHASES.items()]
    usual: dict[str, Any] = {
        "engine": "vllm",
        "version": "0.32.0",
        "state": "ok",
        "core_tgid": 77,
        "request_id": "cmpl-1a2b3c-0",
        "prompt_tokens": 1009,
        "cached_tokens": 512,
        "output_tokens": 31,
        "steps": 33,
        "batch": 5,
        "kv_usage": 0.83,
        "model": "opt-125m",
    }
    finding.engine = EngineFacts(**(usual | facts))
    return finding


SHOWN = """\
100.0 ms, first byte after 40.0 ms, 7 chunks, 700 bytes, 100.0% accounted for
engine vllm 0.32.0, marks degraded, process 77, model opt-125m, request cmpl-1a2b3c-0, template rag
  1009 prompt tokens, 512 of them cached, 31 output tokens in 2 completions, 33 steps, batch 5, KV pool 83% used, \
preempted 3 times, 701 tokens recomputed

Throttled for 33 ms by the quota of /demo/limited.
  cause cpu.throttled, excess 33.4 ms (91% of all excess), confidence 0.80, phase queue
"""
TABLE = """\
  fix       Raise the quota.

  phase           at ms     for ms
  frontend         0.00       2.00  █
  handover         2.00       1.00  █
  queue            3.00      57.00   █████████████
  prefill         60.00      10.00                ███
  decode          70.00      30.00                   ███████

  cause """


def test_explain_shows_phases_and_tokens(run: Run, store: Write, make_finding: MakeFinding) -> None:
    finding = served(
        make_finding(1), state="degraded", n=2, preemptions=3, recomputed_tokens=701, template="rag"
    )
    path = store(finding)
    for name in ("cmpl-1a2b3c-0", "cmpl-1a2b", "0000"):
        status, out, err = run("explain", name, "--store", path)
        assert (status, err) == (0, "")
        shown = re.sub(r" +$", "", out, flags=re.M)
        assert SHOWN in shown
        assert TABLE.rstrip() in shown
    document = json.loads(run("explain", "cmpl-1a2b", "--json", "--store", path)[1])
    start = finding.request.start_ns
    assert document["phases"][2] == {
        "name": "queue",
        "start_ns": start + 3 * MS,
        "end_ns": start + 60 * MS,
        "ms": 57.0,
    }
    assert [p["name"] for p in document["phases"]] == list(PHASES)
    engine = document["engine"]
    assert (engine["prompt_tokens"], engine["cached_tokens"], engine["output_tokens"]) == (1009, 512, 31)
    assert (engine["preemptions"], engine["batch"], engine["kv_usage"]) == (3, 5, 0.83)


def test_what_an_engine_does_not_know_is_not_shown(run: Run, store: Write, make_finding: MakeFinding) -> None:
    finding = make_finding(1)
    finding.engine = EngineFacts()
    out = run("explain", "0000", "--store", store(finding))[1]
    assert "\nengine unknown\n  0 output tokens, 0 steps\n" in out
    assert not re.search("KV pool|prompt tokens|preempted|batch|marks", out)
    assert "phase ttft" in out


def test_the_beginning_of_an_id_may_mean_several(run: Run, store: Write, make_finding: MakeFinding) -> None:
    path = store(served(make_finding(1)), served(make_finding(2), request_id="cmpl-1a2bff-0"))
    status, out, err = run("explain", "cmpl-1a2b", "--store", path)
    assert (status, out) == (1, "")
    assert err == f"whyspan: cmpl-1a2b is ambiguous: {1:032x}, {2:032x}\n"
    assert run("explain", "cmpl-1a2bf", "--store", path)[0] == 0
    for name in ("cmp", "cmpl-1a2c", "cmpl-1a2b3c-0x", "%", "\ud800\ud800\ud800\ud800"):
        assert run("explain", name, "--store", path)[:2] == (1, "")


@pytest.mark.parametrize(
    ("culprit", "cell", "told"),
    [
        (
            Culprit(
                kind="request", name="cmpl-9-0", tgid=77, detail="prefill of 4096 tokens", trace_id="ab" * 16
            ),
            "request cmpl-9-0",
            f"request cmpl-9-0 (process 77, trace {'ab' * 16}): prefill of 4096 tokens",
        ),
        (
            Culprit(kind="peer", name="client at port 40000"),
            "client at port 40000",
            "peer client at port 40000",
        ),
        (
            Culprit(kind="cache", name="KV prefix cache", tgid=77, detail="evicted blocks"),
            "KV prefix cache",
            "cache KV prefix cache (process 77): evicted blocks",
        ),
        (
            Culprit(kind="model", name="opt-125m", tgid=77, detail="dtype float16 → float32"),
            "model opt-125m",
            "model opt-125m (process 77): dtype float16 → float32",
        ),
    ],
)
def test_culprits_of_every_kind(  # noqa: PLR0917
    run: Run, store: Write, make_finding: MakeFinding, culprit: Culprit, cell: str, told: str
) -> None:
    finding = served(make_finding(1))
    finding.verdict.culprit = culprit
    path = store(finding)
    assert f"\n  culprit   {told}\n" in run("explain", "0000", "--store", path)[1]
    (row,) = [line for line in run("slow", "--store", path)[1].splitlines() if "01-02" in line]
    assert f"  {cell} " in row
    (entry,) = json.loads(run("slow", "--json", "--store", path)[1])
    found = entry["verdict"]["culprit"]
    assert (found["kind"], found["trace_id"], found["span_id"]) == (culprit.kind, culprit.trace_id, "")


def test_slow_shows_the_phase_of_the_cause(run: Run, store: Write, make_finding: MakeFinding) -> None:
    path = store(served(make_finding(1)), make_finding(2), served(make_finding(3, slow=False)))
    lines = [line for line in run("slow", "--all", "--store", path)[1].splitlines() if "01-02" in line]
    assert [line.split()[8] for line in lines] == ["-", "ttft", "queue"]
    found = json.loads(run("slow", "--all", "--json", "--store", path)[1])
    told = [(f["phase"], f["engine_phase"], f["engine_request_id"]) for f in found]
    assert told == [("", "", "cmpl-1a2b3c-0"), ("ttft", "", ""), ("ttft", "queue", "cmpl-1a2b3c-0")]


CORE: dict[str, Any] = {
    "tgid": 77,
    "service": "chat",
    "engine": "vllm",
    "version": "0.32.0",
    "role": "core",
    "rank": 0,
    "state": "degraded",
    "missing": ["Scheduler.schedule", "Scheduler.reset"],
    "stages": [
        {"name": "load_model", "what": "opt", "at_ms": 0.0, "ms": 1234.5, "again": False},
        {"name": "compile", "what": "", "at_ms": 2000.0, "ms": 500.0, "again": True},
    ],
    "steps": 12345,
    "running": 3,
    "waiting": 2,
    "kv_usage": 0.834,
    "kv_blocks": {"used": 5, "cached": 1, "free": 2},
    "fragmentation": 0.125,
    "prefix_hit_ratio": 0.25,
    "batch": 4.56,
    "step_ms": 12.345,
    "preemptions": 7,
    "zombies": 1,
    "frozen_s": 4.2,
}
FRONT: dict[str, Any] = CORE | {
    "tgid": 76,
    "role": "frontend",
    "state": "ok",
    "missing": [],
    "stages": [],
    "steps": 0,
    **dict.fromkeys(("running", "waiting", "kv_usage", "fragmentation", "prefix_hit_ratio", "batch")),
    **dict.fromkeys(("step_ms", "preemptions", "zombies", "frozen_s")),
}


def test_engines_are_listed(run: Run, store: Write) -> None:
    path = store(status={"engines": [CORE, FRONT, CORE | {"tgid": 78, "role": "worker", "rank": 1}]})
    status, out, err = run("engines", "--store", path)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if re.match(r" *7\d +chat", line)]
    core = [
        "77",
        "chat",
        "vllm",
        "0.32.0",
        "core",
        "degraded",
        "12,345",
        "3/2",
        "4.6",
        "12.35",
        "83%",
        "25%",
        "7",
    ]
    assert rows[0] == [*core]
    assert rows[1] == ["76", "chat", "vllm", "0.32.0", "frontend", "ok", *["-"] * 7]
    assert rows[2][4:6] == ["worker", "1"]
    assert "process 77: hooks missing: Scheduler.schedule, Scheduler.reset\n" in out
    assert "process 77: no step has ended for 4 s although there is work\n" in out
    assert "process 77: 1 sequences at work for clients that have left\n" in out
    assert "process 77: 12% of the KV blocks given out is not filled by tokens\n" in out
    assert "process 77: start: load_model of opt 1,234 ms, compile 500 ms (again)\n" in out
    assert "process 76:" not in out
    assert json.loads(run("engines", "--json", "--store", path)[1])[0] == CORE


def test_no_engines_and_no_agent_are_two_things(run: Run, store: Write, tmp_path: Path) -> None:
    path = store(status={"probes": []})
    status, out, _ = run("engines", "--store", path)
    assert (status, out.split(":")[0]) == (0, "no engine has spoken")
    assert run("engines", "--json", "--store", path)[1] == "[]\n"
    path.unlink()
    assert "is `whyspan run` running?" in run("engines", "--store", store())[2]
    assert run("engines", "--store", tmp_path / "none.db")[0] == 1


@pytest.mark.parametrize(
    "engines",
    [
        3,
        ["x", None, {}],
        [dict.fromkeys(CORE, "x")],
        [{key: [1] for key in CORE}],
        [dict.fromkeys(CORE, 1 << 70)],
        [CORE | {"stages": [1, {"name": EVIL, "what": EVIL, "ms": "x"}], "missing": [EVIL] * 100}],
        [CORE | dict.fromkeys(("service", "engine", "version", "role", "state"), EVIL)],
    ],
)
def test_any_state_is_shown_disarmed(run: Run, store: Write, engines: Any) -> None:
    status, out, err = run("engines", "--store", store(status={"engines": engines}))
    assert (status, err) == (0, "")
    assert out.replace("\n", "").isprintable()


def test_hostile_engines_reach_the_terminal_disarmed(
    run: Run, store: Write, make_finding: MakeFinding
) -> None:
    names = ("engine", "version", "state", "request_id", "model", "template", "server_span_id")
    finding = served(make_finding(1), **dict.fromkeys(names, EVIL * 100))
    finding.phases = [PhaseTime(EVIL, 0, 1 << 62), *finding.phases, PhaseTime("queue", 1 << 62, -5)]
    finding.verdict.culprit = Culprit(kind="request", name=EVIL, trace_id=EVIL, span_id=EVIL)
    path = store(finding)
    for args in (("explain", EVIL[:4]), ("explain", "0000"), ("slow",), ("slow", "--json")):
        status, out, err = run(*args, "--store", path)
        assert (status, err) == (0, "")
        assert out.replace("\n", "").isprintable()
        assert max(map(len, out.splitlines())) < 1000 or "--json" in args
