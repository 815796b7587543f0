"""A guest's run is judged by the table: one that ran nothing, or less, fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vm.rootdisk import REPOSITORY
from tests.vm.tier import ANY, NOT_RUN, TABLE, Expected, Seen, added, expected, problems, read_junit

MUST = [Expected("tests/bpf/test_a.py", passed=2, skipped=1)]


def seen(*outcomes: str) -> list[Seen]:
    return [Seen("tests/bpf/test_a.py", f"test_{i}", outcome, "why") for i, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (("passed", "passed", "skipped"), ""),
        (("passed", "passed", "passed"), ""),
        ((), "0 passed, the table says 2"),
        (("passed", "skipped"), "1 passed, the table says 2"),
        (
            ("passed", "passed", "skipped", "skipped"),
            "2 skipped, the table says 1 (test_2: why; test_3: why)",
        ),
        (("passed", "passed", "failed"), "test_2 failed: why"),
    ],
)
def test_a_run_is_judged_by_the_table(outcomes: tuple[str, ...], said: str) -> None:
    assert (
        "\n".join(problems(MUST, seen(*outcomes))).removeprefix("tests/bpf/test_a.py").lstrip(":").strip()
        == said
    )


def test_a_guest_that_left_no_report_or_half_of_one_has_run_nothing(tmp_path: Path) -> None:
    assert read_junit(tmp_path / "junit.xml") == []
    (tmp_path / "junit.xml").write_text("<testsuites><testsuite><testcase")
    assert read_junit(tmp_path / "junit.xml") == []


def test_outcomes_and_reasons_are_read_from_the_report(tmp_path: Path) -> None:
    case = '<testcase classname="tests.bpf.test_a" name="{}" time="1.5">{}</testcase>'
    cases = [
        case.format("good", ""),
        case.format("skip", '<skipped message="no such&#10;hook"/>'),
        case.format("bad", '<failure message="assert 1 == 2"/>'),
        case.format("worse", '<error message="failed on setup"/>'),
    ]
    path = tmp_path / "junit.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    file = "tests/bpf/test_a.py"
    assert read_junit(path) == [
        Seen(file, "good", "passed", "", 1.5),
        Seen(file, "skip", "skipped", "no such hook", 1.5),
        Seen(file, "bad", "failed", "assert 1 == 2", 1.5),
        Seen(file, "worse", "failed", "failed on setup", 1.5),
    ]


@pytest.mark.parametrize("series", ["6.1", "6.12"])
@pytest.mark.parametrize("smoke", [False, True])
def test_the_table_names_files_that_exist_and_says_why_tests_are_skipped(series: str, smoke: bool) -> None:
    rows = expected(series, smoke)
    assert [e.path for e in rows if not (REPOSITORY / e.path).is_file()] == []
    assert [e.path for e in rows if bool(e.skipped) != bool(e.why)] == []
    assert [e.path for e in rows if e.passed + e.skipped == 0] == [], TABLE


def test_smoke_is_a_part_of_the_whole() -> None:
    whole = {e.path: e for e in expected("6.12", False)}
    part = expected("6.12", True)
    assert part
    assert [e.path for e in part if e.path in whole and e.passed > whole[e.path].passed] == []
    assert [e.path for e in part if not e.passed] == []


TABLE_OF_TWO = {
    "tests/bpf/test_a.py": {
        "smoke": {"passed": 1, "without": ["test_long["]},
        "6.1": NOT_RUN,
        "6.12": {"passed": 7},
    },
    "tests/bpf/test_b.py": {"6.1": {"passed": 2}, "deselect": ["test_never"]},
}
A, B = TABLE_OF_TWO


def test_a_smoke_run_has_its_own_counts_and_leaves_tests_out() -> None:
    assert expected("6.12", True, TABLE_OF_TWO) == [Expected(A, 1, deselect=("test_long[",))]
    assert expected("6.12", False, TABLE_OF_TWO) == [Expected(A, 7)]


def test_a_file_that_was_not_run_yet_runs_when_it_is_named() -> None:
    b = Expected(B, 2, deselect=("test_never",))
    assert expected("6.1", False, TABLE_OF_TWO) == [b]
    assert expected("6.1", False, TABLE_OF_TWO, ["test_a", "test_b"]) == [Expected(A, 0, ANY), b]
    assert expected("6.12", False, TABLE_OF_TWO, ["test_b"]) == [
        Expected(B, 0, ANY, deselect=("test_never",))
    ]


def test_a_part_adds_to_what_was_seen_on_the_same_kernel() -> None:
    def ran(release: str, smoke: bool, *tests: tuple[str, str]) -> dict[str, Any]:
        seen = [{"path": B, "name": name, "outcome": outcome} for name, outcome in tests]
        return {"release": release, "smoke": smoke, "tests": seen, "alternatives": []}

    old = ran("6.1.0-57-amd64", False, ("test_x", "passed"), ("test_y", "failed"))
    new = ran("6.1.0-57-amd64", True, ("test_y", "passed"), ("test_z", "skipped"))
    both = added(old, new)
    assert [(t["name"], t["outcome"]) for t in both["tests"]] == [
        ("test_x", "passed"),
        ("test_y", "passed"),
        ("test_z", "skipped"),
    ]
    assert not both["smoke"]
    assert added(ran("6.1.0-58-amd64", False, ("test_x", "passed")), new) == new
