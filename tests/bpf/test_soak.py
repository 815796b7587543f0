"""Two minutes of the soak: every part works, and its books balance. An hour: `python -m tests.bench.soak`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench import soak, soak_result

pytestmark = [pytest.mark.bpf, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_two_minutes(tmp_path: Path) -> None:
    asyncio.run(soak.Soak(tmp_path, 120.0, 2000 / 60, 11, Console(width=150)).run())
    record = soak_result.read(tmp_path)
    result = soak_result.judge(record)
    assert result["failed"] == [], result
    assert result["kills"] == 2
    assert result["outages"] == 1
    assert result["faults"]["on"] > 0
    assert result["reloads"] == {"live": 1, "broken": 1, "rebuild": 1, "reopen": 1}
    assert result["ledger"]["counted"] > 1000
    assert result["ledger"]["findings_to_send"] > 0
    assert {role for s in record.samples for role in s["processes"]} >= {
        "supervisor",
        "collector",
        "exporter",
    }
