"""Alert rules by promtool: well-formed, firing when they should, quiet when they should not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from whyspan_dashboards.alerts import ALERTS

from tests.boards import boards
from tests.boards.alert_cases import CASES, Case

pytestmark = pytest.mark.boards


def run(promtool: str, *argv: str) -> str:
    done = subprocess.run([promtool, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rules_and_configuration(promtool: str) -> None:
    assert f"{len(ALERTS)} rules found" in run(promtool, "check", "rules", str(boards.RULES))
    run(promtool, "check", "config", str(boards.RULES.with_name("prometheus.yml")))


def test_every_alert_has_its_cases() -> None:
    assert [c.alert for c in CASES] == [a.name for a in ALERTS]


def _test(case: Case, series: dict[str, str], expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": case.alert,
        "interval": case.step,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
    }


def _expected(case: Case) -> dict[str, Any]:
    rule = next(r for r in boards.rules() if r["alert"] == case.alert)
    return {
        "exp_labels": case.labels | rule["labels"],
        "exp_annotations": rule["annotations"] | {"summary": case.summary},
    }


@pytest.mark.parametrize("kind", ["firing", "quiet"])
@pytest.mark.parametrize("case", CASES, ids=[c.alert for c in CASES])
def test_alert(case: Case, kind: str, promtool: str, tmp_path: Path) -> None:
    firing = kind == "firing"
    test = _test(case, case.firing if firing else case.quiet, [_expected(case)] if firing else [])
    # Its own rule alone: three days of all of them take promtool a minute. JSON is YAML.
    rule = next(r for r in boards.rules() if r["alert"] == case.alert)
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "one", "rules": [rule]}]}))
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": case.step, "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(tests))
    run(promtool, "test", "rules", str(tmp_path / "test.yml"))
