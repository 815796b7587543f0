"""The support matrix says what ran, and the page in docs is what the committed results give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vm.matrix import FEATURES, PAGE, SUPPORT, Cell, cell, collect, page
from tests.vm.tier import TABLE

A, B = "tests/bpf/test_sched.py::test_a", "tests/bpf/test_sched.py::test_b"
WHY = "this kernel has no tracepoint sock_recv_length"


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ({}, Cell("not run")),
        ({"tests/bpf/test_futex.py::test_a": ["passed"]}, Cell("not run")),
        ({A: ["passed"], B: ["passed"]}, Cell("yes (2)")),
        ({A: ["passed"], B: ["skipped", WHY]}, Cell("part (1 of 2)", (WHY,))),
        ({A: ["skipped", WHY], B: ["skipped", WHY]}, Cell("no", (WHY,))),
        ({A: ["passed"], B: ["failed", "assert"]}, Cell("**failed**")),
    ],
)
def test_a_cell_says_what_its_tests_said(tests: dict[str, list[str]], said: Cell) -> None:
    assert cell(tests, ("test_sched.py",)) == said


def result(kernel: str, *, smoke: bool, outcome: str = "passed") -> dict[str, Any]:
    test = {"path": "tests/bpf/test_sched.py", "name": "test_a", "outcome": outcome, "reason": "", "s": 1.0}
    row = {"probe": "sched", "hook": "switch", "alternative": 0, "sections": ["tp_btf/sched_switch"]}
    return {
        "kernel": kernel,
        "release": f"{kernel}.7-amd64",
        "at": "2026-01-01T00:00:00Z",
        "smoke": smoke,
        "tests": [test],
        "alternatives": [
            {**row, "attached": True, "reason": "", "expected": {"sleeps": 23}},
            {**row, "hook": "waking", "attached": True, "reason": "", "expected": {}},
            {**row, "alternative": 1, "sections": [], "attached": False, "reason": WHY, "expected": {}},
        ],
    }


def write(folder: Path, what: dict[str, Any]) -> None:
    (folder / f"kernel-{what['kernel']}.json").write_text(json.dumps(what))


def test_a_smoke_run_never_replaces_a_whole_one_and_an_empty_run_nothing(tmp_path: Path) -> None:
    support = tmp_path / "support.json"
    write(tmp_path, result("6.12", smoke=False))
    assert collect(tmp_path, support) == ["6.12"]
    write(tmp_path, result("6.12", smoke=True, outcome="failed"))
    write(tmp_path, {**result("6.1", smoke=False), "tests": []})
    assert collect(tmp_path, support) == []
    kept = json.loads(support.read_text())
    assert list(kept) == ["6.12"]
    assert kept["6.12"]["tests"] == {A: ["passed"]}


def test_kernels_are_columns_in_their_order_and_hooks_are_rows(tmp_path: Path) -> None:
    support = tmp_path / "support.json"
    write(tmp_path, result("6.12", smoke=False))
    write(tmp_path, result("6.1", smoke=True))
    collect(tmp_path, support)
    text = page(json.loads(support.read_text()))
    assert "| feature | 6.1.7-amd64 | 6.12.7-amd64 |" in text
    test = "tests/bpf/test_alternatives.py::test_alternatives_see_the_same[sched-0]"
    assert "| sched | switch | 1 | `tp_btf/sched_switch` | **failed** | **failed** |" in text  # no such test
    for name in ("6.1", "6.12"):
        support_of = json.loads(support.read_text())
        support_of[name]["tests"][test] = ["passed"]
        support.write_text(json.dumps(support_of))
    text = page(json.loads(support.read_text()))
    assert "| sched | switch | 1 | `tp_btf/sched_switch` | yes | yes |" in text
    assert "| sched | waking | 1 | `tp_btf/sched_switch` | attached | attached |" in text
    assert "| sched | switch | 2 |  | no | no |" in text
    assert "6.1.7-amd64: 2026-01-01T00:00:00Z, smoke only" in text


def test_every_feature_has_its_tests_in_the_table() -> None:
    table = TABLE.read_text()
    assert [p for patterns in FEATURES.values() for p in patterns if f"/{p}" not in table] == []


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(json.loads(SUPPORT.read_text())), "run `python -m tests.vm.matrix`"
