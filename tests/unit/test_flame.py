"""Stacks of many requests, folded and for speedscope, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from whyspan.cli import flame as cli
from whyspan.cli import main
from whyspan.exchange import speedscope
from whyspan.model import CodeFrame, CodeStack, Finding, Verdict
from whyspan.views import flame

from tests.unit.timeline import request

DUMPS = [CodeFrame("dumps", "/lib/json/encoder.py", 203), CodeFrame("render", "/srv/serve.py", 212)]


def stack(cause: str, samples: int, **fields: object) -> CodeStack:
    return CodeStack(cause=cause, tgid=1, tid=1, samples=samples, **fields)  # type: ignore[arg-type]


def finding(*stacks: CodeStack) -> Finding:
    return Finding(
        request=request(0, 100, service="chat"),
        slow=True,
        wall_ns=1,
        accounted_ns=1,
        segments=[],
        causes={},
        baseline={},
        verdict=Verdict(),
        stacks=list(stacks),
    )


def test_stacks_of_several_requests_add_up() -> None:
    view = flame.flame(
        [
            finding(stack("python.loop_blocked", 3, python=DUMPS), stack("work.cpu", 1, native=["b", "a"])),
            finding(
                stack("python.loop_blocked", 4, python=DUMPS, native=["read [c]", "x"], kernel=["sys_read"])
            ),
            finding(stack("python.loop_blocked", 2, python=DUMPS)),
            finding(),
        ]
    )
    assert (view.requests, view.without) == (4, 1)
    assert flame.folded(view) == [
        "chat;python.loop_blocked;render (serve.py:212);dumps (encoder.py:203) 5",
        "chat;python.loop_blocked;render (serve.py:212);dumps (encoder.py:203);x;read [c];sys_read [kernel] 4",
        "chat;work.cpu;a;b 1",
    ]


def test_a_cause_and_all_below_it() -> None:
    findings = [finding(stack("io.log_blocked", 1, native=["a"]), stack("iota", 2, native=["b"]))]
    assert [n for _, n in flame.flame(findings, cause="io").stacks] == [1]
    assert [n for _, n in flame.flame(findings, cause="io.log_blocked").stacks] == [1]


def test_waits_are_not_added_to_samples() -> None:
    findings = [finding(stack("a", 1, native=["x"]), stack("a", 7, native=["y"], blocked=True))]
    assert flame.folded(flame.flame(findings)) == ["chat;a;x 1"]
    assert flame.folded(flame.flame(findings, kind=flame.BLOCKED)) == ["chat;a;y 7"]


def test_what_does_not_fit_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame, "MAX_STACKS", 2)
    many = [finding(*(stack("a", n, native=[f"f{n};"]) for n in range(1, 6)))]
    view = flame.flame(many)
    assert sum(n for _, n in view.stacks) == 15
    assert flame.folded(view) == ["chat;a;f5: 5", "chat;a;f4: 4", "(other stacks) 6"]


def test_a_file_for_speedscope_has_every_frame_once() -> None:
    view = flame.flame([finding(stack("a", 2, native=["y", "x"]), stack("a", 1, native=["x"]))])
    doc = speedscope.document(view, "n")
    (profile,) = doc["profiles"]
    names = [f["name"] for f in doc["shared"]["frames"]]
    assert sorted(names) == ["a", "chat", "x", "y"]
    assert [[names[i] for i in s] for s in profile["samples"]] == [
        ["chat", "a", "x", "y"],
        ["chat", "a", "x"],
    ]
    assert profile["weights"] == [2, 1]
    assert (profile["startValue"], profile["endValue"], profile["type"]) == (0, 3, "sampled")


class Reader:
    """Answers as a store with these findings would."""

    def __init__(self, *findings: Finding) -> None:
        self.stored: list[object] = [SimpleNamespace(finding=f) for f in findings]
        self.asked: dict[str, object] = {}

    def newest(self, **asked: object) -> list[object]:
        self.asked = asked
        return self.stored

    def find(self, name: str) -> list[object]:
        return self.stored if name == "abcd" else []


def run(monkeypatch: pytest.MonkeyPatch, reader: Reader, *argv: str) -> tuple[int, str, str]:
    import contextlib

    monkeypatch.setattr(cli, "open_reader", lambda *_: contextlib.nullcontext(reader))
    result = CliRunner().invoke(cli.command, argv)
    return (
        result.exit_code,
        result.stdout,
        result.stderr + (str(result.exception) if result.exception else ""),
    )


def test_the_command_prints_folded_text(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(finding(stack("a", 2, native=["x"])), finding())
    code, out, err = run(monkeypatch, reader, "--service", "chat", "--since", "10m")
    assert (code, out) == (0, "chat;a;x 2\n")
    assert "1 of 2 requests have no such stacks" in err
    assert reader.asked["service"] == "chat"


def test_the_command_writes_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader = Reader(finding(stack("a", 2, native=["x"])))
    file = tmp_path / "out.json"
    assert run(monkeypatch, reader, "abcd", "--speedscope", str(file))[0] == 0
    assert json.loads(file.read_text())["profiles"][0]["weights"] == [2]
    code, _, err = run(monkeypatch, reader, "--speedscope", str(tmp_path / "no" / "out.json"))
    assert code and "cannot write" in err


def test_no_stacks_and_no_request_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(monkeypatch, Reader(finding()), "--blocked")
    assert code and "no long waits in 1 requests" in err
    code, _, err = run(monkeypatch, Reader(), "ffff")
    assert code and "no request ffff" in err


def test_it_is_one_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["flame", "--help"])
    assert e.value.code == 0
    assert "speedscope" in capsys.readouterr().out
