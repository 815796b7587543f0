"""Recordings of injected faults: the core comes to the same verdicts as when they happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whyspan.pipeline.replay import replay

FOLDER = Path(__file__).with_name("incidents")
INDEX: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())


def test_every_recording_is_listed() -> None:
    assert {p.stem for p in FOLDER.glob("*.rec")} == set(INDEX)
    assert len(INDEX) >= 12


@pytest.mark.parametrize("name", INDEX)
def test_its_requests_get_their_verdict(name: str) -> None:
    wanted = INDEX[name]
    replayed = replay(FOLDER / f"{name}.rec")
    assert not replayed.torn
    found = [f for f in replayed.findings if f.slow or f.request.outcome in ("error", "killed", "reset")]
    assert len(found) == wanted["requests"]
    for f in found:
        assert f.verdict.cause in wanted["causes"], f.verdict.sentence
        assert f.verdict.fix
    who = [f for f in found if [f.verdict.culprit.kind, f.verdict.culprit.name] == wanted["culprit"]]
    assert len(who) == wanted["named"]
