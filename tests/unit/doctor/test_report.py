"""Doctor's report as a whole: its documented shape, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import msgspec
import pytest
from whyspan.config import Config, Run
from whyspan.doctor import report
from whyspan.doctor.check import State
from whyspan.doctor.report import EXIT_STATUS, Report
from whyspan_probes.kernel_btf import KernelBtf

SCHEMA = Path(__file__).parents[3] / "docs" / "doctor.schema.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    config = Config(run=Run(state_dir=str(tmp_path_factory.mktemp("state"))))
    return report.make(config, KernelBtf.find(), try_probes=False, connect=False)


def test_the_documented_shape_is_the_programs() -> None:
    assert json.loads(SCHEMA.read_text()) == json.loads(json.dumps(report.schema())), "run `make generated`"


def test_what_it_prints_has_the_documented_shape(made: Report) -> None:
    printed = json.loads(json.dumps(msgspec.to_builtins(made)))
    schema = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    schema.validate(printed)
    assert msgspec.convert(printed, Report) == made
    del printed["exit_status"]
    assert not schema.is_valid(printed)


def test_ids_are_unique_and_exit_status_follows_the_state(made: Report) -> None:
    ids = [c.id for c in made.checks]
    assert len(set(ids)) == len(ids)
    assert made.exit_status == EXIT_STATUS[made.state]
    assert made.healthy is (made.exit_status == 0)


def test_statuses_of_their_own() -> None:
    assert EXIT_STATUS == {State.OK: 0, State.LIMITED: 3, State.FAILED: 4}
