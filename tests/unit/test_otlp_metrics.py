"""whyspan's own metrics as a real receiver gets them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from whyspan import __version__
from whyspan.config import Otlp
from whyspan.model import EngineFacts, Finding
from whyspan_exporters.link import Count
from whyspan_exporters.metrics import figures
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.otlp.settings import resolve
from whyspan_exporters.otlp.sink import OtlpSink
from whyspan_exporters.records import EXPORTER, Counts, Explained, Status, finding_id

from tests.unit.metrics.full import SCHED
from tests.unit.receivers import RECEIVERS, GrpcReceiver, HttpReceiver, Receiver, values, wait_until

MakeFinding = Callable[..., Finding]
START = 1_700_000_000_000_000_000

COLLECTOR = {
    "probes": [
        SCHED,
        {"name": "sockets", "state": "shed", "events": 503, "drops": 0, "missed": 0},
        {"name": "odd", "state": "\x1b[31m", "events": "many", "hits_per_s": float("nan")},
        "junk",
    ],
    "watched_by_service": {"chat": 3, "embed": 1},
    "open_requests": 5,
    "target_cores": 1.25,
    "findings_dropped": 11,
    "findings_pending": 4,
    "cpu_s": 2.5,
    "rss_bytes": 90_000_000,
}
COUNTS = [
    Count("request_codes", "chat", "ok/200", 997),
    Count("request_codes", "chat", "error/503", 7),
    Count("request_codes", "embed", "reset/0", 2),
    Count("slo", "chat", "e2e/bad", 5),
    Count("not_explained", "chat", "", 31),
    Count("not_explained", "chat", "failed", 37),
    Count("lost_events", "", "sched_wake", 13),
]
EXPORTER_STATUS = {
    "cpu_s": 0.75,
    "rss_bytes": 60_000_000,
    "sinks": {"store": {"state": "disk full", "dropped": 17, "pending": 1, "bytes": 4096}},
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("OTEL_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


MakeSink = Callable[..., OtlpSink]


@pytest.fixture
def make_sink() -> Iterator[MakeSink]:
    """Make sinks that report often; closed at the end."""
    sinks: list[OtlpSink] = []

    def make(receiver: Receiver, **section: Any) -> OtlpSink:
        protocol = "grpc" if isinstance(receiver, GrpcReceiver) else "http/protobuf"
        usual: dict[str, Any] = {
            "endpoint": receiver.endpoint,
            "protocol": protocol,
            "metrics_interval_s": 0.1,
        }
        config = Otlp(**(usual | section))
        sinks.append(OtlpSink(resolve(config, {}), config))
        return sinks[-1]

    yield make
    for sink in sinks:
        sink.close()


def points(metric: Metric) -> dict[tuple[str, ...], float]:
    """The values of a metric by the values of its attributes, in the order of their names."""
    data = getattr(metric, str(metric.WhichOneof("data"))).data_points
    out = {}
    for p in data:
        labels = values(p.attributes)
        out[tuple(str(labels[k]) for k in sorted(labels))] = getattr(p, str(p.WhichOneof("value")))
    assert len(out) == len(data)
    return out


def shape(metric: Metric) -> str:
    kind = str(metric.WhichOneof("data"))
    if kind == "sum":
        assert metric.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        return "counter" if metric.sum.is_monotonic else "updown"
    return kind


@pytest.mark.parametrize("protocol", list(RECEIVERS))
def test_every_metric_arrives(make_finding: MakeFinding, make_sink: MakeSink, protocol: str) -> None:
    receiver = RECEIVERS[protocol]()
    sink = make_sink(receiver)
    explained = [
        make_finding(1),
        make_finding(2),
        make_finding(3, slow=False),
        make_finding(4, service="embed"),
    ]
    sink.emit(
        [
            Counts("i", COUNTS),
            Status("i", COLLECTOR),
            Status(EXPORTER, EXPORTER_STATUS),
            *(Explained(finding_id("i", f), START, f) for f in explained),
        ]
    )
    sink.flush()
    wait_until(lambda: sink.status()["traces"]["sent"] == 12)
    before = len(receiver.metrics)
    wait_until(lambda: len(receiver.metrics) > before + 1)
    found = receiver.newest_metrics()
    spool = {
        name: found.pop(name)
        for name in sorted(found)
        if name.startswith("whyspan.spool.") and "lost" not in name
    }
    assert set(spool) == {"whyspan.spool.items", "whyspan.spool.oldest", "whyspan.spool.size"}
    assert {name: (shape(m), m.unit, points(m)) for name, m in found.items()} == {
        "whyspan.collector.up": ("gauge", "1", {(): 1}),
        "whyspan.request.count": (
            "counter",
            "{request}",
            {("200", "ok", "chat"): 997, ("503", "error", "chat"): 7, ("0", "reset", "embed"): 2},
        ),
        "whyspan.request.open": ("updown", "{request}", {(): 5}),
        "whyspan.request.not_explained": (
            "counter",
            "{request}",
            {("slow", "chat"): 31, ("failed", "chat"): 37},
        ),
        "whyspan.finding.count": (
            "counter",
            "{finding}",
            {("cpu.throttled", "chat"): 2, ("none", "chat"): 1, ("cpu.throttled", "embed"): 1},
        ),
        "whyspan.slo.request.count": ("counter", "{request}", {("chat", "e2e", "bad"): 5}),
        "whyspan.cause.excess.time": (
            "counter",
            "s",
            {
                ("cpu.throttled", "whole", "chat"): pytest.approx(0.0668),
                ("cpu.throttled", "whole", "embed"): pytest.approx(0.0334),
            },
        ),
        "whyspan.cause.culprit.time": (
            "counter",
            "s",
            {
                ("cpu.throttled", "cgroup", "/demo/limited", "chat"): pytest.approx(0.0668),
                ("cpu.throttled", "cgroup", "/demo/limited", "embed"): pytest.approx(0.0334),
            },
        ),
        "whyspan.finding.queued": ("updown", "{finding}", {(): 4}),
        "whyspan.finding.dropped": ("counter", "{finding}", {("collector",): 11, ("store",): 17}),
        "whyspan.event.count": ("counter", "{event}", {("sched",): 1009, ("sockets",): 503}),
        "whyspan.event.dropped": ("counter", "{event}", {("sched",): 13, ("sockets",): 0}),
        "whyspan.probe.state": (
            "gauge",
            "1",
            {("sched", "attached"): 1, ("sockets", "shed"): 1, ("odd", "other"): 1},
        ),
        "whyspan.probe.hit_rate": ("gauge", "{hit}/s", {("sched",): 5148.5}),
        "whyspan.probe.hit_time": ("gauge", "s", {("sched",): pytest.approx(299e-9)}),
        "whyspan.probe.cpu.utilization": ("gauge", "1", {("sched",): 0.0028}),
        "whyspan.probe.missed": ("counter", "{run}", {("sched",): 3, ("sockets",): 0}),
        "whyspan.process.cpu.time": ("counter", "s", {("collector",): 2.5, ("exporter",): 0.75}),
        "whyspan.process.memory.usage": (
            "updown",
            "By",
            {("collector",): 90_000_000, ("exporter",): 60_000_000},
        ),
        "whyspan.target.count": ("updown", "{process}", {("chat",): 3, ("embed",): 1}),
        "whyspan.target.cpu.usage": ("gauge", "{cpu}", {(): 1.25}),
        "whyspan.store.ok": ("gauge", "1", {(): 0}),
        "whyspan.store.size": ("updown", "By", {(): 4096}),
        "whyspan.build.info": ("gauge", "1", {(__version__, platform.release()): 1}),
        "whyspan.spool.lost": ("counter", "{span}", {("traces",): 0, ("metrics",): 0}),
        "whyspan.span.count": ("counter", "{span}", {("sent",): 12, ("failed",): 0, ("dropped",): 0}),
        "whyspan.span.queued": ("updown", "{span}", {(): 0}),
    }
    assert all(re.fullmatch(r"whyspan(\.[a-z_]+)+", name) and m.description for name, m in found.items())
    labels = {
        k
        for m in found.values()
        for p in getattr(m, str(m.WhichOneof("data"))).data_points
        for k in values(p.attributes)
    }
    assert labels == {
        "whyspan.service",
        "whyspan.outcome",
        "whyspan.cause",
        "whyspan.kind",
        "whyspan.probe",
        "whyspan.state",
        "whyspan.process",
        "whyspan.queue",
        "whyspan.result",
        "whyspan.phase",
        "whyspan.culprit.kind",
        "whyspan.culprit.name",
        "whyspan.slo.objective",
        "whyspan.slo.result",
        "whyspan.signal",
        "whyspan.kernel",
        "service.version",
        "http.response.status_code",
    }
    resource_metrics = receiver.metrics[-1].resource_metrics[-1]  # snapshots may share a request
    resource = values(resource_metrics.resource.attributes)
    assert (resource["service.name"], resource["service.version"]) == ("whyspan", __version__)
    assert {"host.name", "host.arch", "service.instance.id", "telemetry.sdk.name"} <= set(resource)
    (scope,) = resource_metrics.scope_metrics
    assert (scope.scope.name, scope.scope.version) == ("whyspan", __version__)
    receiver.stop()


def engine(**said: Any) -> dict[str, Any]:
    """A process as `whyspan.engines.status` tells of it."""
    return {"service": "chat", "engine": "vllm", "state": "ok", "role": "core"} | said


ENGINES = [
    engine(
        running=3,
        waiting=5,
        zombies=1,
        kv_usage=0.5,
        kv_blocks={"used": 7, "cached": 2, "free": 11},
        fragmentation=0.125,
        batch=4.5,
        tokens_per_step=101.25,
        frozen_s=4.0,
    ),
    engine(running=2, waiting=0, zombies=0, kv_usage=0.75, kv_blocks={"used": 1, "free": "x"}, frozen_s=0.0),
    engine(role="frontend", running=None, waiting=None, zombies=None, kv_usage=None, frozen_s=None),
    engine(service="sgl", engine="sglang", state="feeds", running=13, kv_usage=0.25),
    engine(state="ended", running=99, kv_usage=1.0, frozen_s=9.0),
    engine(service=5, running=1),
    "junk",
]
ENGINE_COUNTS = [
    Count("engine_steps", "chat", "vllm", 997),
    Count("engine_batches", "chat", "vllm", 991),
    Count("engine_sequences", "chat", "vllm", 4001),
    Count("engine_step_ns", "chat", "vllm", 1_500_000_000),
    Count("engine_tokens", "chat", "vllm", 9001),
    Count("engine_recomputed", "chat", "vllm", 701),
    Count("engine_prompt_tokens", "chat", "vllm", 5003),
    Count("engine_prompt_tokens", "sgl", "sglang", 17),
    Count("engine_cached_tokens", "chat", "vllm", 2003),
    Count("engine_output_tokens", "chat", "vllm", 1999),
    Count("engine_preemptions", "chat", "vllm", 19),
    Count("engine_evicted_blocks", "chat", "vllm", 23),
    Count("engine_prompts", "chat", "rag", 29),
    Count("engine_prompts", "chat", "", 31),
]


def test_metrics_of_engines(make_finding: MakeFinding, make_sink: MakeSink) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver, metrics_interval_s=3600)
    explained = [make_finding(n) for n in (1, 2, 3)]
    explained[0].engine = EngineFacts(prompt_tokens=101, output_tokens=11, template="rag")
    explained[1].engine = EngineFacts(prompt_tokens=103, output_tokens=13)
    still_open = make_finding(4, outcome="open")
    still_open.engine = EngineFacts(prompt_tokens=1000, output_tokens=1000)
    sink.emit(
        [
            Counts("i", ENGINE_COUNTS),
            Status("i", {"engines": ENGINES}),
            *(Explained(finding_id("i", f), START, f) for f in [*explained, still_open]),
        ]
    )
    sink.close()
    found = receiver.newest_metrics()
    chat = ("vllm", "chat")
    assert {
        name: (shape(m), m.unit, points(m))
        for name, m in found.items()
        if "engine" in name or name == "whyspan.finding.token.count"
    } == {
        "whyspan.engine.step.count": ("counter", "{step}", {chat: 997}),
        "whyspan.engine.batch.count": ("counter", "{batch}", {chat: 991}),
        "whyspan.engine.batch.sequences": ("counter", "{sequence}", {chat: 4001}),
        "whyspan.engine.step.time": ("counter", "s", {chat: 1.5}),
        "whyspan.engine.token.computed": ("counter", "{token}", {chat: 9001}),
        "whyspan.engine.token.recomputed": ("counter", "{token}", {chat: 701}),
        "whyspan.engine.token.prompt": ("counter", "{token}", {chat: 5003, ("sglang", "sgl"): 17}),
        "whyspan.engine.token.cached": ("counter", "{token}", {chat: 2003}),
        "whyspan.engine.token.output": ("counter", "{token}", {chat: 1999}),
        "whyspan.engine.preemption.count": ("counter", "{preemption}", {chat: 19}),
        "whyspan.engine.kv.evicted": ("counter", "{block}", {chat: 23}),
        "whyspan.engine.prompt.count": ("counter", "{prompt}", {("chat", "rag"): 29, ("chat", "none"): 31}),
        "whyspan.engine.sequence.running": ("updown", "{sequence}", {chat: 5, ("sglang", "sgl"): 13}),
        "whyspan.engine.sequence.waiting": ("updown", "{sequence}", {chat: 5}),
        "whyspan.engine.sequence.zombie": ("updown", "{sequence}", {chat: 1}),
        "whyspan.engine.kv.utilization": ("gauge", "1", {chat: 0.625, ("sglang", "sgl"): 0.25}),
        "whyspan.engine.kv.blocks": (
            "updown",
            "{block}",
            {(*chat, "used"): 8, (*chat, "cached"): 2, (*chat, "free"): 11},
        ),
        "whyspan.engine.kv.fragmentation": ("gauge", "1", {chat: 0.125}),
        "whyspan.engine.batch.size": ("gauge", "{sequence}", {chat: 4.5}),
        "whyspan.engine.step.tokens": ("gauge", "{token}", {chat: 101.25}),
        "whyspan.engine.frozen": ("gauge", "{process}", {chat: 1}),
        "whyspan.finding.token.count": (
            "counter",
            "{token}",
            {
                ("input", "chat", "rag"): 101,
                ("output", "chat", "rag"): 11,
                ("input", "chat", "none"): 103,
                ("output", "chat", "none"): 13,
            },
        ),
    }
    assert all(re.fullmatch(r"whyspan(\.[a-z_]+)+", name) and m.description for name, m in found.items())
    receiver.stop()


def test_metrics_can_be_off(make_finding: MakeFinding, make_sink: MakeSink) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver, metrics=False)
    finding = make_finding(1)
    sink.emit([Status("i", COLLECTOR), Explained(finding_id("i", finding), START, finding)])
    sink.close()
    assert (len(receiver.spans()), receiver.metrics) == (4, [])
    assert "metrics" not in sink.status()
    receiver.stop()


def test_the_last_figures_go_out_at_the_end(make_sink: MakeSink) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver, metrics_interval_s=3600)
    sink.emit([Status("i", COLLECTOR)])
    sink.close()
    assert points(receiver.newest_metrics()["whyspan.request.open"]) == {(): 5}
    (request,) = receiver.metrics
    (scope,) = request.resource_metrics[0].scope_metrics
    assert sink.status()["metrics"]["sent"] == sum(len(points(m)) for m in scope.metrics)
    receiver.stop()


def test_deltas_by_configuration_or_environment(make_sink: MakeSink, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
    for section, env in (({"metrics_temporality": "delta"}, ""), ({}, "delta")):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", env)
        receiver = HttpReceiver()
        sink = make_sink(receiver, metrics_interval_s=3600, **section)
        sink.emit([Counts("i", COUNTS), Status("i", COLLECTOR | {"uptime_s": 0.0})])
        sink.close()
        found = receiver.newest_metrics()
        assert found["whyspan.request.count"].sum.aggregation_temporality == delta
        assert points(found["whyspan.request.open"]) == {(): 5}
        receiver.stop()
    with pytest.raises(ValueError, match="metrics_temporality 'sometimes' is not one of"):
        Otlp(metrics_temporality="sometimes")


def test_a_receiver_that_is_down_shows_in_the_state(make_sink: MakeSink) -> None:
    receiver = HttpReceiver()
    receiver.stop()
    sink = make_sink(receiver, timeout_s=0.2)
    sink.emit([Status("i", COLLECTOR)])
    wait_until(lambda: sink.status()["metrics"]["failing"])
    assert "refused" in sink.status()["metrics"]["last_error"]


def total(figures: Figures, name: str) -> float:
    return sum(value for _, _, value in figures.totals(name))


def test_totals_go_on_when_the_collector_restarts() -> None:
    f = Figures()
    for n in range(1, 20):  # 19 runs of the collector, each from 0
        f.add(Counts(f"run{n}", [Count("requests", "chat", "ok", 10)]))
        f.add(Counts(f"run{n}", [Count("requests", "chat", "ok", 100)]))
        f.add(Status(f"run{n}", {"cpu_s": 2.0}))
        assert (total(f, "requests"), total(f, "cpu_s")) == (100 * n, 2.0 * n)
    f.add(Counts("run19", [Count("requests", "chat", "ok", 100)]))  # sent again
    assert total(f, "requests") == 1900


def test_a_failure_that_came_at_once_counts_under_its_cause(make_finding: MakeFinding) -> None:
    f = Figures()
    for n, (outcome, cause) in enumerate(
        [("killed", "memory.oom"), ("killed", "unknown"), ("ok", "memory.oom")], start=1
    ):
        finding = make_finding(n, slow=False)
        finding.request.outcome, finding.verdict.cause = outcome, cause
        f.add(Explained(finding_id("i", finding), START, finding))
    assert {p.labels["whyspan.cause"]: p.value for p in f.found("whyspan.finding.count")} == {
        "memory.oom": 1,
        "none": 2,
    }


def test_series_are_bounded() -> None:
    f = Figures()
    for n in range(100):
        f.add(Counts(f"run{n}", [Count("requests", f"s{n}-{k}", "ok", 1) for k in range(100)]))
    found = f.totals("requests")
    assert len(found) <= 2001
    assert sum(v for _, _, v in found) == 10_000  # nothing is lost, it has no name
    assert ("", "other") in {(service, label) for service, label, _ in found}


def test_a_collector_that_is_gone_has_no_state() -> None:
    now = 1000.0
    f = Figures(lambda: now)
    f.add(Status("i", COLLECTOR))
    assert f.collector() == COLLECTOR
    now += 60
    assert f.collector() == {}
    assert total(f, "probe_events") == 1512  # what was counted stays


@pytest.mark.parametrize("value", [None, True, "7", float("nan"), float("inf"), [], {}])
def test_what_is_no_number_is_absent(value: Any) -> None:
    assert figures.number(value) is None


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"engines": 3},
        {"engines": [{}, {"service": "a", "engine": "b", "kv_blocks": 3}]},
        {"probes": 3},
        {"probes": [{}, {"name": 5}]},
        {"watched_by_service": [1]},
        {"sinks": []},
    ],
)
def test_any_state_is_survived(make_sink: MakeSink, status: dict[str, Any]) -> None:
    receiver = HttpReceiver()
    sink = make_sink(receiver)
    sink.emit([Status("i", status), Status(EXPORTER, status)])
    sink.close()
    found = receiver.newest_metrics()
    assert points(found["whyspan.collector.up"]) == {(): 1 if status else 0}
    assert "whyspan.event.count" not in found
    receiver.stop()
