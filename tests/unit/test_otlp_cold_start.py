"""An engine's start as one trace."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource
from whyspan_exporters.otlp import cold_start

MS = 1_000_000
OFFSET = 1_000_000 * MS


def stage(name: str, at_ms: float, ms: float, what: str = "") -> dict[str, Any]:
    return {"name": name, "what": what, "at_ms": at_ms, "ms": ms, "again": False}


def engine(
    tgid: int, role: str, exec_ms: int, from_ms: int, *stages: dict[str, Any], **more: Any
) -> dict[str, Any]:
    base = {
        "tgid": tgid,
        "service": "vllm",
        "engine": "vllm",
        "version": "0.32.0",
        "role": role,
        "state": "ok",
    }
    return base | {"exec_ns": exec_ms * MS, "stages_from_ns": from_ms * MS, "stages": list(stages)} | more


def started() -> list[dict[str, Any]]:
    return [
        engine(1, "frontend", 1000, 5000, stage("import", 0, 2000), stage("ready", 0, 40_000)),
        engine(2, "core", 9000, 12_000, stage("kv_cache", 20_000, 100)),
        engine(
            3, "worker", 14_000, 16_000, stage("load_model", 0, 9000, "tiny"), stage("warmup", 10_000, 500)
        ),
    ]


def test_the_whole_start_is_one_trace() -> None:
    (start,) = cold_start.ready(started())
    spans: list[Any] = list(cold_start.to_spans(start, Resource({}), OFFSET))
    assert len({s.context.trace_id for s in spans}) == 1
    root = spans[0]
    assert (root.name, root.parent) == ("whyspan.engine.start", None)
    assert (root.start_time, root.end_time) == (OFFSET + 1000 * MS, OFFSET + 45_000 * MS)
    by_id = {s.context.span_id: s for s in spans}
    assert len(by_id) == len(spans) == 9
    for s in spans[1:]:
        parent = by_id[s.parent.span_id]
        assert parent.start_time <= s.start_time <= s.end_time <= parent.end_time
    weights = next(s for s in spans if s.name == "whyspan.engine.stage.load_model")
    assert weights.attributes == {"whyspan.engine.stage.what": "tiny"}
    assert by_id[weights.parent.span_id].attributes["process.pid"] == 3


def test_it_is_told_when_it_is_ready_and_is_the_same_again() -> None:
    unready = started()
    unready[0]["stages"].pop()
    assert cold_start.ready(unready) == []
    one, two = cold_start.ready(started()), cold_start.ready(started())
    assert one[0].key == two[0].key
    ids = [[s.context.span_id for s in cold_start.to_spans(x[0], Resource({}), OFFSET)] for x in (one, two)]
    assert ids[0] == ids[1]


def test_an_ended_engine_has_no_start_and_another_process_has_its_own() -> None:
    assert cold_start.ready([e | {"state": "ended"} for e in started()]) == []
    (first,), (second,) = (
        cold_start.ready(started()),
        cold_start.ready([e | {"tgid": e["tgid"] + 10} for e in started()]),
    )
    assert first.key != second.key


def test_hostile_entries_are_left_out() -> None:
    bad: list[Any] = [None, 5, {"stages": 7}, {"stages": [None, {"name": 3}]}, engine(1, "x", 0, 0)]
    assert cold_start.ready(bad) == []
    (start,) = cold_start.ready([engine(1, "\x1b", 0, 0, stage("ready", 0, 1), stage("x" * 500, -5, 1))])
    assert all(
        "\x1b" not in str(s.attributes) and len(s.name) < 100
        for s in cold_start.to_spans(start, Resource({}), 0)
    )
