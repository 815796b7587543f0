"""Metrics of a real server, scraped from the running agent: all requests are in them, explained or not."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.bench.ports import free_port
from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until
from tests.demo.cgroups import CpuGroup
from tests.demo.procs import ROOT, DemoError

pytestmark = pytest.mark.bpf

PARSE: Any = text_string_to_metric_families
REQUESTS, CHUNKS, HEALTH_CHECKS = 23, 7, 5
TRACEPARENT = "00-%032x-00000000000000ab-01"
QUOTA = 0.05  # less than it takes

CONFIG = """
[prometheus]
listen = "127.0.0.1:{port}"
"""


class Scraped(NamedTuple):
    """What the endpoint said at the end, and what the client's clock says of the same requests, in s."""

    samples: list[Sample]
    total_s: float

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with a name and labels; there must be one."""
        found = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, name
        return sum(s.value for s in found)


def scrape(port: int) -> list[Sample]:
    accept = {"Accept": "application/openmetrics-text"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=20) as response:
        return [s for family in PARSE(response.read().decode()) for s in family.samples]


def count(port: int) -> float:
    try:
        return sum(s.value for s in scrape(port) if s.name == "whyspan_request_count_total")
    except OSError:
        return 0.0


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Stream answers from a server with a CPU quota, few of them explained, beside health checks."""
    folder = tmp_path_factory.mktemp("metrics")
    try:
        group = CpuGroup("bpf-metrics")
    except (DemoError, OSError) as e:
        pytest.skip(f"no usable CPU cgroup: {e}")
    port, metrics_port = free_port(), free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.demo.server", "--port", str(port)],
        cwd=ROOT,
        preexec_fn=group.join,  # noqa: PLW1509
        stderr=subprocess.DEVNULL,
    )
    daemon = Daemon(folder, server.pid, slo="e2e_ms = 1000000", collector=CONFIG.format(port=metrics_port))
    try:
        daemon.wait_ready()
        until(lambda: answered(port, "GET", "/healthz"), "the server is up", every_s=0.1)
        before = until(lambda: count(metrics_port), "the endpoint answers", every_s=0.2)
        group.set_quota(QUOTA)
        # What a quota holds back counts from the look that first saw it.
        until(lambda: limits(metrics_port), "the quota is seen", every_s=0.2)
        total_s = 0.0
        body = json.dumps({"max_tokens": CHUNKS - 1})
        for n in range(1, REQUESTS + 1):
            at = time.monotonic()
            assert answered(port, "POST", "/v1/completions", body, traceparent=TRACEPARENT % n)
            total_s += time.monotonic() - at
        for _ in range(HEALTH_CHECKS - 1):
            assert answered(port, "GET", "/healthz")
        expected = before + REQUESTS + HEALTH_CHECKS - 1
        until(lambda: count(metrics_port) >= expected, "all requests are counted", every_s=0.2)
        until(lambda: in_histogram(metrics_port) >= REQUESTS, "the histograms have come", every_s=0.2)
        until(lambda: len(daemon.findings()) >= expected, "all requests are explained", every_s=0.3)
        yield Scraped(scrape(metrics_port), total_s)
    finally:
        daemon.kill()
        server.kill()
        server.wait()
        group.remove()


def limits(port: int) -> list[Sample]:
    return [s for s in scrape(port) if s.name == "whyspan_host_cpu_limit"]


def in_histogram(port: int) -> float:
    return sum(s.value for s in scrape(port) if s.name == "gen_ai_server_request_duration_seconds_count")


def answered(port: int, method: str, path: str, body: str | None = None, **headers: str) -> bool:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request(method, path, body, headers)
        return client.getresponse().read() is not None
    except OSError:
        return False
    finally:
        client.close()


def test_every_request_is_in_the_histograms_and_health_checks_are_not(scraped: Scraped) -> None:
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert scraped.value(f"gen_ai_server_{name}_seconds_count") == REQUESTS
        assert scraped.value(f"gen_ai_server_{name}_seconds_bucket", le="+Inf") == REQUESTS
    assert (
        scraped.value("whyspan_request_count_total", http_response_status_code="200")
        >= REQUESTS + HEALTH_CHECKS
    )
    assert scraped.value("whyspan_slo_request_count_total", whyspan_slo_objective="success") == REQUESTS
    assert (
        scraped.value(
            "whyspan_slo_request_count_total", whyspan_slo_objective="e2e", whyspan_slo_result="good"
        )
        == REQUESTS
    )


def test_the_sums_agree_with_the_clients_clock(scraped: Scraped) -> None:
    server_s = scraped.value("gen_ai_server_request_duration_seconds_sum")
    assert 0.5 * scraped.total_s < server_s < scraped.total_s
    first_s = scraped.value("gen_ai_server_time_to_first_token_seconds_sum")
    per_token_s = scraped.value("gen_ai_server_time_per_output_token_seconds_sum")
    # The chunks after the first make up the rest, but for the end of the answer behind the last of them.
    assert first_s + per_token_s * (CHUNKS - 1) == pytest.approx(server_s, rel=0.1)
    assert scraped.value("whyspan_request_inter_token_stddev_seconds") > 0


def test_exemplars_are_requests_of_the_client(scraped: Scraped) -> None:
    buckets = [s for s in scraped.samples if s.name.endswith("_bucket") and s.exemplar is not None]
    assert {s.name.removeprefix("gen_ai_server_") for s in buckets} == {
        "request_duration_seconds_bucket",
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_bucket",
    }
    sent = {f"{n:032x}" for n in range(1, REQUESTS + 1)}
    for s in buckets:
        assert s.exemplar is not None
        assert s.exemplar.labels["trace_id"] in sent
        assert s.exemplar.value <= float(s.labels["le"])


def test_the_host_is_in_it(scraped: Scraped) -> None:
    assert scraped.value("whyspan_host_cpu_limit") == pytest.approx(QUOTA)
    assert scraped.value("whyspan_host_throttled_time_seconds_total") > 0
    if Path("/proc/pressure/cpu").exists():
        assert (
            0
            <= scraped.value("whyspan_host_pressure_ratio", whyspan_resource="cpu", whyspan_pressure="some")
            <= 1
        )
    assert scraped.value("whyspan_build_info_ratio") == scraped.value("whyspan_collector_up_ratio") == 1
    (target,) = [s for s in scraped.samples if s.name == "target_info"]
    assert target.labels["service_name"] == "whyspan"
