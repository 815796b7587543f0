"""Everything that the plugin wraps is there, with the parameters it reads: in the vLLM installed, and in 0.33.0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine import install
from tests.unit.inproc.signatures import HOOKS, table

RECORDED = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("vllm-*.json")}


def problems(found: dict[str, list[str] | None]) -> list[str]:
    wrong = []
    for hook in HOOKS:
        parameters = found[f"{hook.module}:{hook.target}"]
        if parameters is None:
            if not hook.optional:
                wrong.append(f"{hook.target}: not there")
        elif not set(hook.params) <= set(parameters):
            wrong.append(f"{hook.target}: lacks {set(hook.params) - set(parameters)}")
    return wrong


@pytest.mark.parametrize("version", ["vllm-0.32.0", "vllm-0.33.0"])
def test_recorded_versions(version: str) -> None:
    # Made from the wheels by tests.unit.inproc.signatures; a hook that is added must be added there too.
    assert problems(RECORDED[version]) == []


def test_installed_version() -> None:
    found = sorted(install.environment().glob("lib/python3.*/site-packages/vllm"))
    if not found:
        pytest.skip("no vLLM is installed: `make vllm` installs it")
    assert problems(table(found[0])) == []


def test_check_can_fail() -> None:
    broken = dict(RECORDED["vllm-0.33.0"])
    broken["vllm.v1.core.sched.scheduler:Scheduler.schedule"] = ["self"]
    broken["vllm.v1.core.sched.scheduler:Scheduler._preempt_request"] = None
    assert problems(broken) == [
        "Scheduler.schedule: lacks {'throttle_prefills'}",
        "Scheduler._preempt_request: not there",
    ]
