"""A finding as spans: ids, times, nesting, names, bounds, and nothing that must stay."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv import attributes as stable
from opentelemetry.semconv._incubating import attributes as incubating
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from whyspan import __version__
from whyspan.engines.view import PHASES
from whyspan.model import (
    Culprit,
    EngineFacts,
    Finding,
    PhaseTime,
    ProcessFact,
    Request,
    RuledOut,
    Segment,
    Verdict,
)
from whyspan_exporters.otlp.resource import Resources
from whyspan_exporters.otlp.spans import ENGINE_PHASES, MAX_SPANS, to_spans
from whyspan_exporters.records import Explained

MakeFinding = Callable[..., Finding]
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
START = 1_700_000_000_000_000_000
RESOURCE = Resource({"service.name": "chat"})
MS = 1_000_000


def spans_of(finding: Finding, finding_id: str = "i-1-1", start: int = START) -> list[ReadableSpan]:
    return to_spans(Explained(finding_id, start, finding), RESOURCE)


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def by_name(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    out = {s.name: s for s in spans}
    assert len(out) == len(spans)
    return out


def parent_names(spans: list[ReadableSpan]) -> dict[str, str]:
    names = {context(s).span_id: s.name for s in spans}
    return {
        s.name: names.get(s.parent.span_id, f"{s.parent.span_id:016x}") if s.parent else "" for s in spans
    }


def with_path(finding: Finding, *pieces: tuple[int, int, str], **changes: Any) -> Finding:
    """The finding with segments of (start ms, end ms, cause), and the times per cause that they add up to."""
    start = finding.request.start_ns
    segments = [
        Segment(
            start_ns=start + a * MS,
            end_ns=start + b * MS,
            tgid=100,
            tid=101,
            thread="loop",
            state="runnable",
            cause=cause,
        )
        for a, b, cause in pieces
    ]
    causes: dict[str, float] = {}
    for a, b, cause in pieces:
        causes[cause] = causes.get(cause, 0.0) + b - a
    return msgspec.structs.replace(finding, segments=segments, causes=causes, **changes)


#: Of the request of `make_finding`, in ms.
PHASE_TIMES = {
    "frontend": (0, 2),
    "handover": (2, 3),
    "queue": (3, 30),
    "prefill": (30, 40),
    "decode": (40, 90),
    "delivery": (90, 100),
}


def with_engine(finding: Finding, **facts: Any) -> Finding:
    """The finding, in place, with what an engine says of its request."""
    start = finding.request.start_ns
    finding.phases = [PhaseTime(n, start + a * MS, start + b * MS) for n, (a, b) in PHASE_TIMES.items()]
    usual: dict[str, Any] = {
        "engine": "vllm",
        "version": "0.32.0",
        "state": "degraded",
        "core_tgid": 77,
        "request_id": "cmpl-1-0",
        "prompt_tokens": 1009,
        "cached_tokens": 512,
        "output_tokens": 31,
        "preemptions": 1,
        "recomputed_tokens": 701,
        "steps": 33,
        "batch": 5,
        "kv_usage": 0.75,
        "model": "opt-125m",
    }
    finding.engine = EngineFacts(**(usual | facts))
    return finding


def test_a_request_with_a_traceparent(make_finding: MakeFinding) -> None:
    finding = make_finding(
        1, trace_id=TRACE, trace_id_source="traceparent", parent_span_id=CALLER, sampled=True
    )
    spans = spans_of(finding)
    assert [s.name for s in spans] == [
        "whyspan.request",
        "whyspan.phase.ttft",
        "whyspan.phase.stream",
        "whyspan.cause.cpu.throttled",
    ]
    assert {f"{context(s).trace_id:032x}" for s in spans} == {TRACE}
    assert {s.kind for s in spans} == {SpanKind.INTERNAL}
    assert {s.instrumentation_scope for s in spans} == {InstrumentationScope("whyspan", __version__)}
    assert {s.resource for s in spans} == {RESOURCE}
    assert parent_names(spans) == {
        "whyspan.request": CALLER,
        "whyspan.phase.ttft": "whyspan.request",
        "whyspan.phase.stream": "whyspan.request",
        "whyspan.cause.cpu.throttled": "whyspan.request",  # from 33 to 67 ms, across the first byte at 40 ms
    }
    remote = [s.parent.is_remote if s.parent else None for s in spans]
    assert remote == [True, False, False, False]
    times = {s.name: ((s.start_time or 0) - START, (s.end_time or 0) - START) for s in spans}
    assert times == {
        "whyspan.request": (0, 100 * MS),
        "whyspan.phase.ttft": (0, 40 * MS),
        "whyspan.phase.stream": (40 * MS, 100 * MS),
        "whyspan.cause.cpu.throttled": (33_333_333, 66_666_666),
    }
    assert {s.status.status_code for s in spans} == {StatusCode.UNSET}


def test_a_request_without_a_traceparent_is_a_root(make_finding: MakeFinding) -> None:
    request = spans_of(make_finding(5))[0]
    assert request.parent is None
    assert context(request).trace_id == 5
    assert (request.attributes or {})["whyspan.trace_id_source"] == "generated"


def test_the_same_finding_gives_the_same_ids(make_finding: MakeFinding) -> None:
    finding = make_finding(1, trace_id=TRACE)
    first, again = spans_of(finding), spans_of(finding, start=START + 12345)
    assert [context(s) for s in first] == [context(s) for s in again]
    other = spans_of(finding, finding_id="i-1-2")
    assert not {context(s).span_id for s in first} & {context(s).span_id for s in other}


def test_attributes_of_a_request(make_finding: MakeFinding) -> None:
    finding = make_finding(
        1,
        request_id="req-7",
        tenant="acme",
        request_bytes=512,
        recv_ns=2_000_000_000 + 3 * MS,
        trace_id_source="traceparent",
        sampled=False,
    )
    finding.lost_events = 3
    assert dict(spans_of(finding)[0].attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "http.request.body.size": 512,
        "http.response.body.size": 700,
        "http.request.header.x-request-id": ["req-7"],
        "http.request.header.x-tenant-id": ["acme"],
        "thread.id": 100,
        "thread.name": "worker-0",
        "whyspan.finding_id": "i-1-1",
        "whyspan.trace_id_source": "traceparent",
        "whyspan.parent_sampled": False,
        "whyspan.outcome": "ok",
        "whyspan.slow": True,
        "whyspan.slow_reason": "objective",
        "whyspan.phase": "ttft",
        "whyspan.verdict": "cpu.throttled",
        "whyspan.sentence": "Throttled for 33 ms by the quota of /demo/limited.",
        "whyspan.ttft_ms": 40.0,
        "whyspan.socket_wait_ms": 3.0,
        "whyspan.accounted_ratio": 1.0,
        "whyspan.baseline_requests": 50,
        "whyspan.lost_events": 3,
        "whyspan.chunks": 7,
        "whyspan.cause_ms.cpu.throttled": 33.4,
        "whyspan.cause_ms.work.cpu": 33.3,
        "whyspan.cause_ms.work.timer": 33.3,
    }


def test_attributes_of_a_root_cause(make_finding: MakeFinding) -> None:
    finding = make_finding(1)
    finding.lost_events = 3
    span = by_name(spans_of(finding))["whyspan.cause.cpu.throttled"]
    assert dict(span.attributes or {}) == {
        "whyspan.cause": "cpu.throttled",
        "whyspan.primary": True,
        "whyspan.time_ms": 33.4,
        "whyspan.usual_ms": 0.0,
        "whyspan.excess_ms": 33.4,
        "whyspan.share": 0.91,
        "whyspan.confidence": 0.8,
        "whyspan.segments": 1,
        "whyspan.lost_events": 3,
        "whyspan.sentence": "Throttled for 33 ms by the quota of /demo/limited.",
        "whyspan.fix": "Raise the quota.",
        "whyspan.ruled_out": ["cpu.runqueue: no wait without throttling"],
        "whyspan.culprit.kind": "cgroup",
        "whyspan.culprit.name": "/demo/limited",
        "whyspan.culprit.detail": "quota",
        "whyspan.culprit.pid": 7,
        "whyspan.culprit.tid": 8,
        "process.pid": 100,
        "thread.id": 101,
        "thread.name": "worker-1",
    }
    assert [(e.name, e.timestamp - START, dict(e.attributes or {})) for e in span.events] == [
        ("whyspan.evidence", 33_333_333, {"whyspan.evidence": "2 throttled periods"}),
        (
            "whyspan.segment",
            33_333_333,
            {
                "whyspan.duration_ms": 33.333333,
                "whyspan.state": "throttled",
                "whyspan.detail": "quota 20 ms of 100 ms",
                "process.pid": 100,
                "thread.id": 101,
                "thread.name": "worker-1",
            },
        ),
    ]


def test_a_cause_with_gaps_is_one_span_with_its_own_time(make_finding: MakeFinding) -> None:
    pieces = [(i * 10, i * 10 + 10, "cpu.throttled" if i % 2 else "work.cpu") for i in range(10)]
    finding = with_path(make_finding(1), *pieces)
    finding.segments[3].inferred = True
    span = by_name(spans_of(finding))["whyspan.cause.cpu.throttled"]
    attributes = dict(span.attributes or {})
    assert ((span.start_time or 0) - START, (span.end_time or 0) - START) == (10 * MS, 100 * MS)
    assert (attributes["whyspan.time_ms"], attributes["whyspan.segments"]) == (50.0, 5)
    assert attributes["whyspan.inferred_ratio"] == 0.2


def test_other_causes_with_a_clear_excess_follow(make_finding: MakeFinding) -> None:
    finding = with_path(
        make_finding(1),
        (0, 40, "cpu.throttled"),
        (40, 41, "io.disk_contention"),
        (41, 61, "cpu.runqueue"),
        (61, 91, "python.loop_blocked"),
        (91, 99, "work.cpu"),
        (99, 100, "unknown"),
        baseline={"python.loop_blocked": 5.0, "io.disk_contention": 0.5},
    )
    spans = spans_of(finding)
    assert [s.name for s in spans[3:]] == [
        "whyspan.cause.cpu.throttled",
        "whyspan.cause.python.loop_blocked",
        "whyspan.cause.cpu.runqueue",
    ]
    rest = [dict(s.attributes or {}) for s in spans[4:]]
    assert [(a["whyspan.primary"], a["whyspan.excess_ms"], a["whyspan.time_ms"]) for a in rest] == [
        (False, 25.0, 30.0),
        (False, 20.0, 20.0),
    ]
    # What the verdict says is said once, so that it can be summed up.
    for attributes in rest:
        assert not {"whyspan.share", "whyspan.confidence", "whyspan.fix", "whyspan.ruled_out"} & set(
            attributes
        )
    assert parent_names(spans)["whyspan.cause.cpu.throttled"] == "whyspan.phase.ttft"  # it ends with it
    assert parent_names(spans)["whyspan.cause.cpu.runqueue"] == "whyspan.phase.stream"


def test_unknown_is_a_verdict_too(make_finding: MakeFinding) -> None:
    finding = with_path(make_finding(1), (0, 100, "work.cpu"))
    finding.verdict = Verdict(excess_ms=60.0, sentence="Took 100 ms; no known cause explains it.")
    finding.phase = "stream"
    span = by_name(spans_of(finding))["whyspan.cause.unknown"]
    attributes = dict(span.attributes or {})
    assert (attributes["whyspan.cause"], attributes["whyspan.primary"]) == ("unknown", True)
    assert attributes["whyspan.excess_ms"] == 60.0
    assert attributes["whyspan.ruled_out"] == ["cpu.runqueue: no wait without throttling"]
    # It has no segments of its own: it covers the phase that was slow.
    assert ((span.start_time or 0) - START, (span.end_time or 0) - START) == (40 * MS, 100 * MS)


def test_the_engines_phases_stand_for_those_by_the_first_byte(make_finding: MakeFinding) -> None:
    finding = with_engine(
        with_path(
            make_finding(1), (0, 5, "work.cpu"), (5, 25, "engine.queueing"), (25, 100, "engine.kv_preemption")
        )
    )
    finding.verdict.cause = "engine.queueing"
    spans = spans_of(finding)
    assert [s.name for s in spans[1:7]] == [f"whyspan.phase.{n}" for n in PHASES]
    assert ENGINE_PHASES == PHASES
    times = {
        s.name.rpartition(".")[2]: ((s.start_time or 0) - START, (s.end_time or 0) - START)
        for s in spans[1:7]
    }
    assert times == {n: (a * MS, b * MS) for n, (a, b) in PHASE_TIMES.items()}
    parents = parent_names(spans)
    assert {parents[f"whyspan.phase.{n}"] for n in PHASES} == {"whyspan.request"}
    assert parents["whyspan.cause.engine.queueing"] == "whyspan.phase.queue"
    assert parents["whyspan.cause.engine.kv_preemption"] == "whyspan.request"  # across phases


def test_with_all_phases_and_many_causes_there_is_room_for_thirteen(make_finding: MakeFinding) -> None:
    finding = with_engine(with_path(make_finding(1), *((i, i + 2, f"cause.{i}") for i in range(0, 80, 2))))
    finding.verdict.cause = "cause.78"
    spans = spans_of(finding)
    assert len(spans) == MAX_SPANS
    assert [s.name for s in spans].index("whyspan.cause.cause.78") == 7  # the verdict's is never crowded out


def test_phases_that_make_no_sense_are_left_out(make_finding: MakeFinding) -> None:
    finding = with_engine(make_finding(1))
    start = finding.request.start_ns
    finding.phases = [
        PhaseTime("queue", start - 5 * MS, start + 10 * MS),
        PhaseTime("queue", start + 10 * MS, start + 20 * MS),  # a second time: it would have the same id
        PhaseTime("\x1b[31m", start, start + MS),
        PhaseTime("decode", start + 30 * MS, start + 20 * MS),
        PhaseTime("delivery", start + 90 * MS, start + 500 * MS),
    ]
    spans = by_name(spans_of(finding))
    assert {n for n in spans if "phase" in n} == {"whyspan.phase.queue", "whyspan.phase.delivery"}
    queue, delivery = spans["whyspan.phase.queue"], spans["whyspan.phase.delivery"]
    assert ((queue.start_time or 0) - START, (queue.end_time or 0) - START) == (0, 10 * MS)
    assert (delivery.end_time or 0) - START == 100 * MS


def test_attributes_of_the_engine(make_finding: MakeFinding) -> None:
    finding = with_engine(make_finding(1, route="/v1/chat/completions"), n=3, template="rag")
    before = dict(spans_of(make_finding(1, route="/v1/chat/completions"))[0].attributes or {})
    after = dict(spans_of(finding)[0].attributes or {})
    assert {k: v for k, v in after.items() if k not in before} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.model": "opt-125m",
        "gen_ai.request.choice.count": 3,
        "gen_ai.usage.input_tokens": 1009,
        "gen_ai.usage.output_tokens": 31,
        "gen_ai.usage.cache_read.input_tokens": 512,
        "whyspan.engine.name": "vllm",
        "whyspan.engine.version": "0.32.0",
        "whyspan.engine.state": "degraded",
        "whyspan.engine.request_id": "cmpl-1-0",
        "whyspan.engine.pid": 77,
        "whyspan.engine.preemptions": 1,
        "whyspan.engine.recomputed_tokens": 701,
        "whyspan.engine.steps": 33,
        "whyspan.engine.batch_size": 5,
        "whyspan.engine.kv_utilization": 0.75,
        "whyspan.engine.template": "rag",
    }


def test_what_an_engine_does_not_know_is_absent_and_what_is_0_is_0(make_finding: MakeFinding) -> None:
    finding = make_finding(1)
    finding.engine = EngineFacts()
    known = dict(spans_of(finding)[0].attributes or {})
    names = {k for k in known if k.startswith(("gen_ai.", "whyspan.engine."))}
    assert names == {"gen_ai.operation.name"}
    finding.engine = EngineFacts(prompt_tokens=7, kv_usage=0.0)
    known = dict(spans_of(finding)[0].attributes or {})
    assert known["gen_ai.usage.cache_read.input_tokens"] == 0
    assert known["whyspan.engine.preemptions"] == known["whyspan.engine.kv_utilization"] == 0


@pytest.mark.parametrize(
    ("server", "caller", "parent"),
    [
        ("a" * 16, CALLER, "a" * 16),
        ("", CALLER, CALLER),
        ("0" * 16, CALLER, CALLER),
        ("not an id", CALLER, CALLER),
        ("a" * 16, "", "a" * 16),
        ("", "", ""),
    ],
)
def test_the_servers_own_span_comes_before_the_callers(
    make_finding: MakeFinding, server: str, caller: str, parent: str
) -> None:
    finding = with_engine(make_finding(1, trace_id=TRACE, parent_span_id=caller), server_span_id=server)
    spans = spans_of(finding)
    assert parent_names(spans)["whyspan.request"] == parent
    assert f"{context(spans[0]).trace_id:032x}" == TRACE


@pytest.mark.parametrize("kind", ["request", "peer", "cache", "model"])
def test_a_culprit_without_a_span_is_named_and_not_linked(make_finding: MakeFinding, kind: str) -> None:
    finding = with_engine(make_finding(1))
    trace = "" if kind != "request" else "f" * 32  # a request without a traceparent: whyspan's own trace id
    finding.verdict.culprit = Culprit(kind=kind, name="x", detail="why", trace_id=trace)
    span = by_name(spans_of(finding))["whyspan.cause.cpu.throttled"]
    assert not span.links
    attributes = {k: v for k, v in (span.attributes or {}).items() if k.startswith("whyspan.culprit.")}
    expected = {"whyspan.culprit.kind": kind, "whyspan.culprit.name": "x", "whyspan.culprit.detail": "why"}
    assert attributes == expected | ({"whyspan.culprit.trace_id": trace} if trace else {})


def test_an_ordinary_request_claims_nothing(make_finding: MakeFinding) -> None:
    spans = spans_of(make_finding(1, slow=False))
    assert [s.name for s in spans] == ["whyspan.request", "whyspan.phase.ttft", "whyspan.phase.stream"]
    attributes = dict(spans[0].attributes or {})
    assert attributes["whyspan.slow"] is False
    assert "whyspan.verdict" not in attributes
    assert attributes["whyspan.cause_ms.cpu.throttled"] == 33.4


DESCRIPTION = "The client closed the connection after 50 ms; no cause takes more time than usual."


@pytest.mark.parametrize(
    ("changes", "error_type", "description"),
    [
        ({"outcome": "error", "status": 404}, "", None),
        ({"outcome": "error", "status": 503}, "503", None),
        ({"outcome": "error", "status": 429}, "429", None),
        ({"outcome": "reset", "status": 0, "first_ns": 0}, "connection_reset", DESCRIPTION),
        ({"outcome": "reset", "status": 200, "ended_by": "client_close"}, "client_close", DESCRIPTION),
        ({"outcome": "killed", "status": 200, "ended_by": "process_exit"}, "process_exit", DESCRIPTION),
    ],
)
def test_failed_requests(
    make_finding: MakeFinding, changes: dict[str, Any], error_type: str, description: str | None
) -> None:
    finding = make_finding(1, slow=False, **changes)
    finding.verdict.sentence = DESCRIPTION
    spans = spans_of(finding)
    request = spans[0]
    attributes = dict(request.attributes or {})
    assert attributes.get("error.type", "") == error_type
    assert attributes.get("http.response.status_code", 0) == changes["status"]
    assert attributes["whyspan.outcome"] == changes["outcome"]
    assert request.status.status_code is (StatusCode.ERROR if error_type else StatusCode.UNSET)
    assert request.status.description == description
    assert {s.status.status_code for s in spans[1:]} <= {StatusCode.UNSET}
    assert attributes.get("whyspan.ended_by", "") == changes.get("ended_by", "")
    # A failed request has a verdict, which may be unknown; without a body byte it has no phases.
    names = ["whyspan.request", "whyspan.phase.ttft", "whyspan.phase.stream", "whyspan.cause.unknown"]
    assert [s.name for s in spans] == ([names[0], names[3]] if changes.get("first_ns") == 0 else names)


def test_the_culprit_of_another_request_is_linked(make_finding: MakeFinding) -> None:
    finding = make_finding(1)
    finding.verdict.culprit = Culprit(
        kind="request", name="long prefill", trace_id=TRACE, span_id=CALLER, tgid=5
    )
    span = by_name(spans_of(finding))["whyspan.cause.cpu.throttled"]
    (link,) = span.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (TRACE, CALLER)
    assert link.context.is_remote
    assert dict(link.attributes or {}) == {"whyspan.link": "culprit"}
    attributes = dict(span.attributes or {})
    assert attributes["whyspan.culprit.trace_id"] == TRACE
    assert attributes["whyspan.culprit.span_id"] == CALLER


@pytest.mark.parametrize(
    ("trace_id", "span_id"),
    [
        ("", ""),
        (TRACE, ""),
        ("0" * 32, CALLER),
        (TRACE, "0" * 16),
        ("x" * 32, CALLER),
        (TRACE, "0x" + "1" * 14),
    ],
)
def test_an_id_that_is_none_is_no_link(make_finding: MakeFinding, trace_id: str, span_id: str) -> None:
    finding = make_finding(1)
    finding.verdict.culprit = Culprit(kind="request", name="x", trace_id=trace_id, span_id=span_id)
    assert not by_name(spans_of(finding))["whyspan.cause.cpu.throttled"].links


def test_unusual_methods_stay_few(make_finding: MakeFinding) -> None:
    attributes = dict(spans_of(make_finding(1, method="BREW"))[0].attributes or {})
    assert attributes["http.request.method"] == "_OTHER"
    assert attributes["http.request.method_original"] == "BREW"


def test_resource_of_the_service(make_finding: MakeFinding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES",
        "deployment.environment.name=prod,host.name=rack%207,service.name=other,process.pid=1,"
        "service.instance.id=none",
    )
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other2")
    finding = make_finding(1)
    finding.process = ProcessFact(
        tgid=100,
        comm="python",
        exe="python3.11",
        service="chat",
        cgroup="/kubepods/pod1/c",
        start_ticks=77,
        vpid=9,
        container_id="c" * 64,
        pod_uid="1b2c",
    )
    resources = Resources()
    resource = resources.of(finding)
    attributes = dict(resource.attributes)
    instance = attributes.pop("service.instance.id")
    assert attributes.pop("host.arch") in {"amd64", "arm64", "ppc64", "s390x", "riscv64"}
    attributes.pop("host.id", None)  # a host without a machine id has none
    assert attributes == {
        "service.name": "chat",
        "host.name": "rack 7",
        "os.type": "linux",
        "deployment.environment.name": "prod",
        "process.pid": 100,
        "process.vpid": 9,
        "process.executable.name": "python3.11",
        "process.linux.cgroup": "/kubepods/pod1/c",
        "container.id": "c" * 64,
        "k8s.pod.uid": "1b2c",
        "telemetry.distro.name": "whyspan",
        "telemetry.distro.version": __version__,
    }
    assert resources.of(make_finding(2)).attributes["process.pid"] == 100
    assert "container.id" not in resources.of(make_finding(2)).attributes
    assert Resources().of(finding).attributes["service.instance.id"] == instance  # the same after a restart
    finding.process = msgspec.structs.replace(finding.process, start_ticks=78)
    assert resources.of(finding).attributes["service.instance.id"] != instance


def test_resource_of_whyspan_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "vllm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=9,team=infra")
    attributes = Resources().whyspan().attributes
    assert (attributes["service.name"], attributes["service.version"]) == ("whyspan", __version__)
    assert (attributes["team"], attributes["telemetry.sdk.name"]) == ("infra", "opentelemetry")
    assert attributes["service.instance.id"] == Resources().whyspan().attributes["service.instance.id"]


def standard_names() -> set[str]:
    """Every attribute that the semantic conventions know."""
    names: set[str] = set()
    for package in (stable, incubating):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found = vars(importlib.import_module(module.name)).values()
            names |= {value for value in found if isinstance(value, str)}
    return names


def test_every_name_is_standard_or_ours(make_finding: MakeFinding) -> None:
    finding = make_finding(1, request_id="r", tenant="t", outcome="error", status=500, method="BREW")
    finding.process = ProcessFact(100, "c", "e", "chat", "/g", vpid=2, container_id="c", pod_uid="p")
    with_engine(finding, n=2, template="rag")
    spans = to_spans(Explained("i", START, finding), Resources().of(finding))
    keys = {k for s in spans for k in s.attributes or {}} | set(spans[0].resource.attributes)
    keys |= {k for s in spans for e in s.events for k in e.attributes or {}}
    theirs = {k for k in keys if not k.startswith(("whyspan.", "http.request.header."))}
    assert theirs - standard_names() == set()
    assert {"gen_ai.usage.cache_read.input_tokens", "gen_ai.request.choice.count"} <= theirs
    assert {"process.vpid", "k8s.pod.uid", "container.id", "error.type", "host.arch", "url.path"} <= theirs
    # No name may also be the beginning of another: some backends keep attributes as nested objects.
    assert not {(a, b) for a in keys for b in keys if b.startswith(f"{a}.")}


def test_what_leaves_is_clean_and_bounded(make_finding: MakeFinding) -> None:
    finding = make_finding(1, request_id="id\x1b[31m\u202e" + "y" * 100_000)
    finding.verdict.sentence = "x" * 100_000
    finding.segments[0].thread = "\x1b]0;evil\x07"
    spans = spans_of(finding)
    texts = [str(v) for s in spans for v in (s.attributes or {}).values()]
    texts += [str(v) for s in spans for e in s.events for v in (e.attributes or {}).values()]
    assert all(t.isprintable() for t in texts)
    assert max(map(len, texts)) < 1000


# Properties over any finding, however little sense it makes.

ANY_INT = st.integers(-(1 << 63), (1 << 63) - 1)
ANY_TEXT = st.text(max_size=20) | st.sampled_from(["", TRACE, CALLER, "\ud800", "\x1b[31m", "x" * 5000])
ANY_FLOAT = st.floats()
CAUSES = st.sampled_from(["cpu.throttled", "io.log_blocked", "work.cpu", "unknown"]) | st.integers(0, 40).map(
    lambda n: f"cause.{n}"
)
SEGMENTS = st.builds(
    Segment,
    start_ns=ANY_INT,
    end_ns=ANY_INT,
    tgid=ANY_INT,
    tid=ANY_INT,
    thread=ANY_TEXT,
    state=ANY_TEXT,
    cause=CAUSES,
    detail=ANY_TEXT,
    inferred=st.booleans(),
)
REQUESTS = st.builds(
    Request,
    trace_id=ANY_TEXT,
    trace_id_source=ANY_TEXT,
    parent_span_id=ANY_TEXT,
    sampled=st.booleans(),
    request_id=ANY_TEXT,
    tenant=ANY_TEXT,
    service=ANY_TEXT,
    tgid=ANY_INT,
    start_tid=ANY_INT,
    method=ANY_TEXT,
    route=ANY_TEXT,
    status=ANY_INT,
    outcome=st.sampled_from(["ok", "error", "reset", "killed", "open"]) | ANY_TEXT,
    ended_by=ANY_TEXT,
    head=ANY_TEXT,
    start_ns=ANY_INT,
    recv_ns=ANY_INT,
    first_ns=ANY_INT,
    end_ns=ANY_INT,
    chunks=ANY_INT,
    request_bytes=ANY_INT,
    response_bytes=ANY_INT,
)
ENGINES = st.builds(
    EngineFacts,
    engine=ANY_TEXT,
    version=ANY_TEXT,
    state=ANY_TEXT,
    core_tgid=ANY_INT,
    request_id=ANY_TEXT,
    prompt_tokens=ANY_INT,
    cached_tokens=ANY_INT,
    output_tokens=ANY_INT,
    preemptions=ANY_INT,
    recomputed_tokens=ANY_INT,
    steps=ANY_INT,
    batch=ANY_INT,
    kv_usage=ANY_FLOAT,
    n=ANY_INT,
    template=ANY_TEXT,
    model=ANY_TEXT,
    server_span_id=ANY_TEXT,
)
PHASE_LISTS = st.lists(
    st.builds(PhaseTime, st.sampled_from(PHASES) | ANY_TEXT, ANY_INT, ANY_INT), max_size=12
)
VERDICTS = st.builds(
    Verdict,
    cause=CAUSES,
    excess_ms=ANY_FLOAT,
    share=ANY_FLOAT,
    confidence=ANY_FLOAT,
    culprit=st.builds(
        Culprit,
        kind=ANY_TEXT,
        name=ANY_TEXT,
        tgid=ANY_INT,
        detail=ANY_TEXT,
        trace_id=ANY_TEXT,
        span_id=ANY_TEXT,
    ),
    sentence=ANY_TEXT,
    evidence=st.lists(ANY_TEXT, max_size=40),
    fix=ANY_TEXT,
)
FINDINGS = st.builds(
    Finding,
    request=REQUESTS,
    slow=st.booleans(),
    slow_reason=ANY_TEXT,
    phase=st.sampled_from(["", "ttft", "stream"]) | ANY_TEXT,
    wall_ns=ANY_INT,
    accounted_ns=ANY_INT,
    segments=st.lists(SEGMENTS, max_size=60),
    causes=st.dictionaries(CAUSES, ANY_FLOAT, max_size=60),
    baseline=st.dictionaries(CAUSES, ANY_FLOAT, max_size=10),
    verdict=VERDICTS,
    ruled_out=st.lists(st.builds(RuledOut, ANY_TEXT, ANY_TEXT), max_size=40),
    lost_events=ANY_INT,
    phases=PHASE_LISTS,
    engine=st.none() | ENGINES,
)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, said: list[logging.LogRecord]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record)


@settings(max_examples=150, deadline=None)
@given(FINDINGS, ANY_INT)
def test_any_finding_becomes_a_small_valid_tree(finding: Finding, start: int) -> None:
    spans = spans_of(finding, start=start)
    said: list[logging.LogRecord] = []
    handler = Lines(said)
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(handler)
    encoded = encode_spans(spans).SerializeToString()
    logger.removeHandler(handler)
    assert said == []  # the encoder drops, with a line in the log, what OTLP cannot carry
    assert 1 <= len(spans) <= MAX_SPANS == 20
    assert len(encoded) < 150_000
    ids = [context(s).span_id for s in spans]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    assert len({context(s).trace_id for s in spans}) == 1
    assert context(spans[0]).trace_id
    assert {s.kind for s in spans} == {SpanKind.INTERNAL}
    known = dict(zip(ids, spans, strict=True))
    assert spans[0].name == "whyspan.request"
    for span in spans[1:]:
        assert span.parent is not None
        parent = known[span.parent.span_id]
        assert parent is not span
        assert (parent.start_time or 0) <= (span.start_time or 0) <= (span.end_time or 0)
        assert (span.end_time or 0) <= (parent.end_time or 0)
        assert span.name.isprintable()
    primary = [s for s in spans if (s.attributes or {}).get("whyspan.primary")]
    assert len(primary) == (1 if finding.slow or finding.verdict.sentence else 0)
    assert [context(s) for s in spans_of(finding, start=start)] == [context(s) for s in spans]
