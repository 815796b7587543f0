"""A guest's run is judged by the table: one that ran nothing, or less, fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vm.rootdisk import REPOSITORY
from tests.vm.tier import TABLE, Expected, Seen, expected, problems, read_junit

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
def test_the_table_names_files_that_exist_and_says_why_tests_are_skipped(series: str) -> None:
    rows = expected(series, smoke=False)
    assert rows
    assert [e.path for e in rows if not (REPOSITORY / e.path).is_file()] == []
    assert [e.path for e in rows if bool(e.skipped) != bool(e.why)] == []
    assert [e.path for e in rows if e.passed + e.skipped == 0] == [], TABLE


def test_smoke_is_a_part_of_the_whole() -> None:
    whole, part = expected("6.12", smoke=False), expected("6.12", smoke=True)
    assert {e.path for e in part} < {e.path for e in whole}
