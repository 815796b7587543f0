"""Findings to store and show, for the tests of the outer half."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from whyspan.config import OTLP_PROTOCOLS
from whyspan.model import Culprit, Finding, Request, RuledOut, Segment, Verdict

if TYPE_CHECKING:
    from tests.unit.receivers import Receiver

MakeFinding = Callable[..., Finding]
StartExporter = Callable[..., "subprocess.Popen[bytes]"]
Run = Callable[..., "tuple[int, str, str]"]


def build_finding(
    n: int = 1, *, segments: int = 3, slow: bool = True, cause: str = "cpu.throttled", **request: Any
) -> Finding:
    """Return a finding whose every part depends on *n*; 100 ms long, tiled by equal segments."""
    start = 1_000_000_000 * (n + 1)
    wall = 100_000_000
    cuts = [start + wall * i // segments for i in range(segments + 1)]
    causes = ["work.cpu", cause, "work.timer"]
    base = Request(
        trace_id=f"{n:032x}",
        trace_id_source="generated",
        service="chat",
        tgid=100,
        start_tid=100,
        end_tid=100,
        method="POST",
        route="/v1/completions",
        status=200,
        start_ns=start,
        head_ns=start + 10_000_000,
        first_ns=start + 40_000_000,
        end_ns=start + wall,
        chunks=7,
        response_bytes=700,
        cookie=0xC0 + n,
        seq=n,
    )
    return Finding(
        request=msgspec.structs.replace(base, **request),
        slow=slow,
        slow_reason="objective" if slow else "",
        phase="ttft" if slow else "",
        wall_ns=wall,
        accounted_ns=wall,
        segments=[
            Segment(
                start_ns=a,
                end_ns=b,
                tgid=100,
                tid=100 + i % 3,
                thread=f"worker-{i % 3}",
                state=("running", "throttled", "blocked")[i % 3],
                cause=causes[i % 3],
                detail="quota 20 ms of 100 ms" if i % 3 == 1 else "",
            )
            for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ],
        causes={"work.cpu": 33.3, cause: 33.4, "work.timer": 33.3},
        baseline={"work.cpu": 30.0, "work.timer": 33.0},
        baseline_count=50,
        verdict=Verdict(
            cause=cause,
            excess_ms=33.4,
            share=0.91,
            confidence=0.8,
            culprit=Culprit(kind="cgroup", name="/demo/limited", tgid=7, tid=8, detail="quota"),
            sentence="Throttled for 33 ms by the quota of /demo/limited.",
            evidence=["2 throttled periods"],
            fix="Raise the quota.",
        )
        if slow
        else Verdict(),
        ruled_out=[RuledOut("cpu.runqueue", "no wait without throttling")] if slow else [],
    )


@pytest.fixture
def make_finding() -> MakeFinding:
    """Return `build_finding`."""
    return build_finding


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line; returns exit status, standard output and standard error."""
    from whyspan import cli

    monkeypatch.setenv("WHYSPAN_CONFIG", "")

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(a) for a in args])
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def start_exporter(tmp_path: Path) -> Iterator[StartExporter]:
    """Start real exporter processes on ``tmp_path/state``; each is ready when the call returns."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(**overrides: Any) -> subprocess.Popen[bytes]:
        state = tmp_path / "state"
        socket_path = state / "exporter.sock"
        socket_path.unlink(missing_ok=True)
        config = {"run": {"state_dir": str(state)}, **overrides}
        env = os.environ | {"WHYSPAN_OVERRIDES": msgspec.json.encode(config).decode(), "WHYSPAN_CONFIG": ""}
        process = subprocess.Popen(
            [sys.executable, "-m", "whyspan_exporters.exporter"], env=env, stderr=subprocess.PIPE
        )
        processes.append(process)
        wait_for(socket_path.exists)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert b"listening on" in line, line
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Wait until *condition* holds; fail when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    """Return `wait_for`."""
    return wait_for


@pytest.fixture
def no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's environment decides where spans go."""
    for name in [n for n in os.environ if n.startswith("OTEL_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=OTLP_PROTOCOLS)
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    """A running receiver of either protocol."""
    from tests.unit.receivers import RECEIVERS  # gRPC, which most tests do without

    running = RECEIVERS[request.param]()
    yield running
    running.stop()
