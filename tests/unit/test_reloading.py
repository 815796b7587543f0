"""What a reload does with each key."""

from __future__ import annotations

import msgspec
import pytest
from whyspan.config import Collector, Config, Objectives, Otlp, Run, Slo, Target, Targets
from whyspan.reloading import Effect, changes, effect


def keys() -> list[str]:
    sections = msgspec.structs.fields(Config)
    return [f"{s.name}.{key.name}" for s in sections for key in msgspec.structs.fields(s.type)]


@pytest.mark.parametrize("key", keys())
def test_every_key_has_an_effect(key: str) -> None:
    assert effect(key) in Effect


def test_nothing_has_changed() -> None:
    found = changes(Config(), Config())
    assert found == ([], [], [], [])
    assert str(found) == "nothing"


def test_changes_are_told_apart_by_what_they_take() -> None:
    new = Config(
        slo=Slo(ttft_ms=500),
        targets=Targets(match=(Target(comm="x"),)),
        collector=Collector(ring_bytes=1 << 20, window_s=30),
        otlp=Otlp(endpoint="http://127.0.0.1:4318"),
        run=Run(state_dir="/x"),
    )
    found = changes(Config(), new)
    assert found.live == ["targets.match", "slo.ttft_ms", "collector.window_s"]
    assert found.rebuild == ["collector.ring_bytes"]
    assert found.reopen == ["otlp.endpoint"]
    assert found.restart == ["run.state_dir"]
    assert str(found).startswith("targets.match, slo.ttft_ms, ")


def test_objectives_of_a_service_count_as_one_key() -> None:
    assert Slo(services={}).objectives("chat") == Objectives()
    new = msgspec.convert({"slo": {"services": {"chat": {"ttft_ms": 1}}}}, Config)
    assert changes(Config(), new).live == ["slo.services"]
