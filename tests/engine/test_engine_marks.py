"""A real vLLM with the plugin, seen by the agent: phases, time without a name, and what a killed core leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from whyspan.model import Finding

from tests.bench.ports import free_port
from tests.demo.procs import python
from tests.engine import inproc, vllm
from tests.engine.conftest import OTHER_CPU, WORKER_CPU, load
from tests.engine.watch import Watch
from tests.unit.receivers import GrpcReceiver, values

REQUESTS = 1000
CONFIG = """\
[collector]
explain_per_s = 1000
explain_core_ratio = 2
ordinary_per_s = 1000
"""
OTLP = """\
[otlp]
endpoint = "{endpoint}"
protocol = "grpc"
"""
#: vLLM's figure for each phase, and which of ours it covers. Its prefill ends, and its decode begins, with the first
#: token in the core; its queue begins with the QUEUED event there.
PHASES = {
    "gen_ai.latency.time_in_queue": "queue",
    "gen_ai.latency.time_in_model_prefill": "prefill",
    "gen_ai.latency.time_in_model_decode": "decode",
}


@pytest.fixture(scope="module")
def marked(receiver: GrpcReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm.Server]:
    """A server with the plugin that sends its own spans; an agent watches its start."""
    folder = tmp_path_factory.mktemp("marked")
    log = (folder / "vllm.log").open("wb")
    server = vllm.start(
        free_port(),
        extra=["--otlp-traces-endpoint", receiver.endpoint],
        env={
            **inproc.environment(),
            "OTEL_SERVICE_NAME": "vllm-itself",
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        },
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        with Watch(folder, server.pid, OTLP.format(endpoint=receiver.endpoint)) as watch:
            server.wait_ready(lambda line: print(line, flush=True))
            watch.wait(lambda: bool(_named(receiver, "whyspan.engine.start")), 15, "told of the start")
        server.pin({WORKER_CPU}, {OTHER_CPU})
        yield server
    finally:
        server.stop()
        log.close()


@pytest.fixture(scope="module")
def seen(
    marked: vllm.Server, receiver: GrpcReceiver, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """A thousand requests' findings, and the attributes of vLLM's own spans by trace id."""
    folder: Path = tmp_path_factory.mktemp("marks")
    with Watch(folder, marked.pid, CONFIG, {OTHER_CPU}) as watch:
        sizes = ("--prompt-tokens", "4:32", "--tokens", "2:6")
        sent = load(marked, folder / "client.jsonl", "--closed", 3, "--requests", REQUESTS, *sizes)
        found = watch.explained((r["trace_id"] for r in sent), 120)
    wanted = {r["trace_id"] for r in sent}
    end = time.monotonic() + 20  # vLLM's own exporter sends in batches
    theirs: dict[str, dict[str, Any]] = {}
    while time.monotonic() < end and len(theirs) < REQUESTS:
        theirs = {
            s.trace_id.hex(): values(s.attributes)
            for s in receiver.spans()
            if s.name == "llm_request" and s.trace_id.hex() in wanted
        }
        time.sleep(0.5)
    assert len(theirs) == len(sent) == REQUESTS
    return [found[r["trace_id"]] for r in sent], theirs


def _named(receiver: GrpcReceiver, prefix: str) -> list[Any]:
    return [s for s in receiver.spans() if s.name.startswith(prefix)]


def test_the_start_is_one_trace(marked: vllm.Server, receiver: GrpcReceiver) -> None:
    (start,) = _named(receiver, "whyspan.engine.start")
    mine = [s for s in _named(receiver, "whyspan.engine.") if s.trace_id == start.trace_id]
    processes = {values(s.attributes)["process.pid"]: s for s in mine if s.name == "whyspan.engine.process"}
    assert set(processes) >= {marked.pid, marked.engine_core, marked.worker}
    stages = {s.name.removeprefix("whyspan.engine.stage."): s for s in mine if ".stage." in s.name}
    assert {"load_model", "kv_cache", "ready"} <= set(stages)
    assert stages["load_model"].parent_span_id == processes[marked.worker].span_id
    for s in mine:
        assert start.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano
        assert s.end_time_unix_nano <= start.end_time_unix_nano
    seconds = (start.end_time_unix_nano - start.start_time_unix_nano) / 1e9
    assert 5 < seconds < 240


def test_every_request_is_joined_with_its_engine_request(
    seen: tuple[list[Finding], dict[str, dict[str, Any]]],
) -> None:
    findings, theirs = seen
    for f in findings:
        assert f.engine is not None
        own = theirs[f.request.trace_id]
        assert own["gen_ai.request.id"].startswith(f.engine.request_id)
        assert f.engine.prompt_tokens == own["gen_ai.usage.prompt_tokens"]
        assert f.engine.output_tokens == own["gen_ai.usage.completion_tokens"]


@pytest.mark.parametrize("name", PHASES)
def test_phases_are_vllms_own(
    seen: tuple[list[Finding], dict[str, dict[str, Any]]], name: str, record_property: Any
) -> None:
    findings, theirs = seen
    apart, share = [], []
    for f in findings:
        ours = sum(p.end_ns - p.start_ns for p in f.phases if p.name == PHASES[name])
        off = abs(ours - theirs[f.request.trace_id][name] * 1e9)
        apart.append(off / 1e6)
        share.append(off / f.wall_ns)
    share.sort()
    record_property("median_ms", median(apart))
    record_property("p99_share", share[int(0.99 * len(share))])
    print(
        f"{name}: median {median(apart):.3f} ms apart, P99 {share[int(0.99 * len(share))]:.2%} of the request"
    )
    assert median(apart) <= 2
    assert share[int(0.99 * len(share))] <= 0.05


def test_nearly_all_time_is_known_and_none_of_it_guessed(
    seen: tuple[list[Finding], dict[str, dict[str, Any]]],
) -> None:
    findings, _ = seen
    wall = sum(f.wall_ns for f in findings)
    loose = sum(
        s.end_ns - s.start_ns for f in findings for s in f.segments if s.inferred or s.cause == "unknown"
    )
    print(f"unknown and inferred: {loose / wall:.3%} of {wall / 1e9:.0f} s")
    assert loose <= 0.05 * wall


def test_phases_tile_every_request(seen: tuple[list[Finding], dict[str, dict[str, Any]]]) -> None:
    findings, _ = seen
    for f in findings:
        assert f.phases[0].start_ns == f.request.start_ns
        assert f.phases[-1].end_ns == f.request.end_ns
        assert all(a.end_ns == b.start_ns for a, b in zip(f.phases, f.phases[1:], strict=False))


def test_a_killed_core_leaves_a_clear_state(
    marked: vllm.Server, seen: tuple[list[Finding], dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    # The last test: it ends the server.
    with Watch(tmp_path, marked.pid, CONFIG, {OTHER_CPU}) as watch:
        out = tmp_path / "client.jsonl"
        base = ("--port", marked.port, "--out", out, "--api", "vllm", "--model", vllm.NAME)
        sizes = ("--prompt-tokens", "16:32", "--tokens", "1800:1900")
        with subprocess.Popen(
            python("tests.demo.load", *base, "--closed", 2, "--requests", 20, *sizes)
        ) as client:
            watch.wait(lambda: bool(_steps(watch)), 30, "seen stepping")
            killed_ns = time.monotonic_ns()
            os.kill(marked.engine_core, signal.SIGKILL)
            client.wait(60)
        # How many have ended by then depends on the machine; those that came later met no engine.
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        sent = [r["trace_id"] for r in lines if r["start_ns"] < killed_ns < r["end_ns"]]
        assert sent
        found = watch.explained(sent, 60)
        watch.wait(lambda: marked.engine_core not in _cores(watch), 30, "rid of the core")
        for f in (found[t] for t in sent):
            assert f.engine is not None
            assert f.engine.steps > 0
            assert f.phases[-1].end_ns == f.request.end_ns
            # Its front end ends the stream in good order, inside a 200.
            assert (f.request.outcome, f.request.ended_by) == ("killed", "engine_exit")
            assert f"process {marked.engine_core}" in f.verdict.sentence, f.verdict
    assert (
        not psutil.pid_exists(marked.engine_core) or psutil.Process(marked.engine_core).status() == "zombie"
    )


def _cores(watch: Watch) -> dict[int, dict[str, Any]]:
    """The engine cores that ``whyspan engines`` lists as alive."""
    listed = watch.query("engines") or []
    return {e["tgid"]: e for e in listed if e["role"] == "core" and e["state"] != "ended"}


def _steps(watch: Watch) -> int:
    return sum(e["running"] or 0 for e in _cores(watch).values())
