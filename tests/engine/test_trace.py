"""One trace per request in a real receiver: the client's context, vLLM's own span, whyspan's spans under it."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.engine import vllm
from tests.engine.conftest import OTHER_CPU, load
from tests.engine.watch import Watch
from tests.unit.receivers import GrpcReceiver

REQUESTS = 1000
CONFIG = """\
[collector]
explain_per_s = 1000
explain_core_ratio = 2
ordinary_per_s = 1000

[otlp]
endpoint = "{endpoint}"
protocol = "grpc"
export_ordinary = true
"""
#: The clocks are one, but a span's start is the first byte in the server's socket, and the client's stamp is before.
SLACK_NS = 2_000_000

Traces = dict[str, list[Span]]


@pytest.fixture(scope="module")
def sent_and_seen(
    server: vllm.Server, receiver: GrpcReceiver, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Traces]:
    """A thousand requests with their own trace contexts, and all spans that arrived, by trace id."""
    folder: Path = tmp_path_factory.mktemp("trace")
    with Watch(folder, server.pid, CONFIG.format(endpoint=receiver.endpoint), {OTHER_CPU}) as watch:
        sizes = ("--prompt-tokens", "4:8", "--tokens", "1:3")
        sent = load(server, folder / "client.jsonl", "--closed", 3, "--requests", REQUESTS, *sizes)
        watch.explained((r["trace_id"] for r in sent), 90)
    end = time.monotonic() + 20  # vLLM's own exporter sends in batches
    while time.monotonic() < end and len(by_name(receiver.spans(), "llm_request")) < REQUESTS:
        time.sleep(0.5)
    traces: Traces = defaultdict(list)
    for span in receiver.spans():
        traces[span.trace_id.hex()].append(span)
    return sent, traces


def by_name(spans: list[Span], name: str) -> list[Span]:
    return [s for s in spans if s.name == name]


def test_every_request_has_both_spans_under_the_clients(
    sent_and_seen: tuple[list[dict[str, Any]], Traces],
) -> None:
    sent, traces = sent_and_seen
    assert len(sent) == REQUESTS
    wrong = []
    for r in sent:
        spans, client = traces[r["trace_id"]], bytes.fromhex(r["span_id"])
        theirs, ours = by_name(spans, "llm_request"), by_name(spans, "whyspan.request")
        if [s.parent_span_id for s in theirs] != [client] or [s.parent_span_id for s in ours] != [client]:
            wrong.append((r["trace_id"], [(s.name, s.parent_span_id.hex()) for s in spans]))
    assert wrong == []


def test_whyspans_spans_nest_and_are_few(sent_and_seen: tuple[list[dict[str, Any]], Traces]) -> None:
    sent, traces = sent_and_seen
    for r in sent:
        ours = [s for s in traces[r["trace_id"]] if s.name.startswith("whyspan.")]
        assert 1 <= len(ours) <= 20
        spans = {s.span_id: s for s in ours}
        assert len(spans) == len(ours)
        for s in ours:
            assert s.kind == Span.SPAN_KIND_INTERNAL
            if s.name == "whyspan.request":
                continue
            parent = spans[s.parent_span_id]
            assert parent.start_time_unix_nano <= s.start_time_unix_nano
            assert s.end_time_unix_nano <= parent.end_time_unix_nano


def test_the_times_are_the_clients(sent_and_seen: tuple[list[dict[str, Any]], Traces]) -> None:
    sent, traces = sent_and_seen
    offset = time.time_ns() - time.monotonic_ns()
    late = 0
    for r in sent:
        (ours,) = by_name(traces[r["trace_id"]], "whyspan.request")
        begin, end = r["start_ns"] + offset - SLACK_NS, r["end_ns"] + offset + SLACK_NS
        late += not (begin <= ours.start_time_unix_nano <= ours.end_time_unix_nano <= end)
    assert late == 0


def test_vllms_own_figures_and_ours_agree(sent_and_seen: tuple[list[dict[str, Any]], Traces]) -> None:
    # vLLM's span begins when its handler runs and ends when the engine is done; ours holds it but for the ends.
    sent, traces = sent_and_seen
    inside = 0
    for r in sent:
        spans = traces[r["trace_id"]]
        (theirs,), (ours,) = by_name(spans, "llm_request"), by_name(spans, "whyspan.request")
        inside += (
            ours.start_time_unix_nano <= theirs.start_time_unix_nano + SLACK_NS
            and theirs.end_time_unix_nano <= ours.end_time_unix_nano + SLACK_NS
        )
    assert inside >= 0.99 * len(sent)
