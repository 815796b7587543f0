"""Recordings of injected faults: the core comes to the same verdicts as when they happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import whyspan.engine
from whyspan.causes import Classified, Context, classify
from whyspan.causes.cpu_runqueue import LONG_WAIT_NS
from whyspan.causes.rule import LOCK, LONG_WAIT, Conditional, Needing, OfStates, rules
from whyspan.critical_path import Path as CriticalPath
from whyspan.pipeline.replay import replay
from whyspan.timeline import RUNNABLE, WAKEUP

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


@pytest.mark.parametrize("name", ["cpu_hog", "gil_hog", "user_lock"])
def test_a_rule_claims_nothing_without_what_it_says_it_needs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules are not asked about such segments, which must not change what is found."""
    asked = 0

    def ask_all(path: CriticalPath, ctx: Context) -> Classified:
        nonlocal asked
        ctx.path = path
        able = [r for r in rules() if not isinstance(r, Conditional) or r.applies(ctx)]
        for rule in (r for r in able if isinstance(r, Needing)):
            for s in path.segments:
                if isinstance(rule, OfStates) and s.state not in rule.states:
                    continue
                short = s.state in (RUNNABLE, WAKEUP) and s.whole_ns < LONG_WAIT_NS
                if (LOCK in rule.needs and s.via is None) or (LONG_WAIT in rule.needs and short):
                    asked += 1
                    assert rule.match(s, ctx) is None, rule.id
        return classify(path, ctx)

    monkeypatch.setattr(whyspan.engine, "classify", ask_all)
    replay(FOLDER / f"{name}.rec")
    assert asked > 500
