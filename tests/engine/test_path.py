"""The path of ordinary requests through a real vLLM, without any plugin."""

from __future__ import annotations

from statistics import median

import pytest
from whyspan.model import Finding

from tests.engine import vllm
from tests.engine.conftest import OTHER_CPU, load
from tests.engine.watch import Watch

EXPLAIN_ALL = "[collector]\nexplain_per_s = 1000\nexplain_core_ratio = 2\nordinary_per_s = 1000\n"


@pytest.fixture(scope="module")
def findings(server: vllm.Server, tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    """Sixty requests at a rate that the server takes with ease, every one explained."""
    folder = tmp_path_factory.mktemp("path")
    with Watch(folder, server.pid, EXPLAIN_ALL, {OTHER_CPU}) as watch:
        sizes = ("--prompt-tokens", "16:64", "--tokens", "4:12")
        sent = load(server, folder / "client.jsonl", "--rate", 3, "--requests", 60, *sizes)
        found = watch.explained((r["trace_id"] for r in sent), 60)
    assert all(r["status"] == 200 and not r["error"] for r in sent)
    return [found[r["trace_id"]] for r in sent]


def named_ratio(finding: Finding) -> float:
    """Return the share of the wall time that lies in segments with a name."""
    unknown = sum(s.end_ns - s.start_ns for s in finding.segments if s.cause == "unknown")
    return 1 - unknown / finding.wall_ns


def test_nine_tenths_of_the_time_has_a_name(findings: list[Finding]) -> None:
    ratios = sorted(named_ratio(f) for f in findings)
    assert sum(ratios) / len(ratios) >= 0.9
    assert ratios[len(ratios) // 20] >= 0.9  # all but one in twenty


def test_the_path_goes_through_all_three_processes(server: vllm.Server, findings: list[Finding]) -> None:
    whole = 0
    for f in findings:
        tgids = {s.tgid for s in f.segments}
        whole += tgids >= {server.pid, server.engine_core, server.worker}
    assert whole >= 0.95 * len(findings)


def test_the_model_has_most_of_the_time(server: vllm.Server, findings: list[Finding]) -> None:
    # The worker computes; the engine core that spins for it must not be charged with that.
    def share(tgid: int, f: Finding) -> float:
        return sum(s.end_ns - s.start_ns for s in f.segments if s.tgid == tgid) / f.wall_ns

    assert median(share(server.worker, f) for f in findings) > 0.4
    assert median(share(server.worker, f) - share(server.engine_core, f) for f in findings) > 0


def test_the_front_ends_part_comes_first(server: vllm.Server, findings: list[Finding]) -> None:
    # Up to the hand-over the request is in the API server: never in the engine before it was sent there.
    starts = [next(s for s in f.segments if s.state == "running") for f in findings]
    assert sum(s.tgid == server.pid for s in starts) >= 0.95 * len(starts)
