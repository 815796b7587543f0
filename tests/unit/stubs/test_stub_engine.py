"""The stub engine: what its steps execute, exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.demo.procs import ROOT
from tests.engine import inproc
from tests.stubs import servers
from tests.stubs.device import Device
from tests.stubs.model import kernel_launches

TOKENS = 11


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(gpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[servers.Served]:
    with servers.engine(device, "--sync", "blocking") as engine:
        engine.complete(2)
        yield engine


def test_tokens_are_streamed(served: servers.Served) -> None:
    text = served.post("/v1/completions", {"prompt": [1] * 8, "max_tokens": 3}).decode()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == [" token0", " token1", " token2"]
    assert events[-1] == "[DONE]"


def test_a_request_executes_what_its_steps_say(device: Device, served: servers.Served) -> None:
    before, kernels = device.counters(), device.kernels
    copies = device.copies()
    served.complete(TOKENS)
    after = device.counters()

    def more(function: str) -> int:
        counts = [counters[function].calls if function in counters else 0 for counters in (before, after)]
        return counts[1] - counts[0]

    forward = kernel_launches()
    assert more("cudaGraphLaunch") == more("cuGraphLaunch") == TOKENS - 1  # the prompt's step has none
    assert more("cudaLaunchKernel") == more("cuLaunchKernel") == forward
    assert device.kernels - kernels == TOKENS * forward
    assert more("cudaEventSynchronize") == more("cuEventSynchronize") == TOKENS
    assert more("cuMemcpyHtoDAsync_v2") == 3 * TOKENS and more("cuMemcpyDtoHAsync_v2") == TOKENS
    key = ("d2h", "pinned", "async")
    assert device.copies()[key].number - copies[key].number == TOKENS
    assert more("cuMemAlloc_v2") == more("cuStreamSynchronize") == 0


def test_the_ring_has_the_waits_as_the_engine_saw_them(device: Device, served: servers.Served) -> None:
    served.complete(TOKENS)
    steps = served.steps()[-TOKENS:]
    waits = device.calls("cudaEventSynchronize")[-TOKENS:]
    assert len(set(waits["tid"])) == 1 and waits["tid"][0] != waits["tgid"][0] == served.process.pid
    for step, wait in zip(steps, waits, strict=True):
        assert step["enqueued_ns"] <= wait["begin_ns"] <= wait["end_ns"] <= step["end_ns"]


def test_marks_are_what_the_agent_takes(device: Device, tmp_path: Path) -> None:
    sink = {
        "PYTHONPATH": f"{ROOT / 'probes/whyspan_inproc'}{os.pathsep}{inproc.SINK}",
        "WHYSPAN_TEST_MARKS": str(tmp_path),
    }
    with servers.engine(device, "--ranks", "2", "--sync", "blocking", env=sink) as served:
        served.complete(TOKENS)
        # What the other rank says last may still be on its way; it is done when it takes up the next request.
        served.complete(1)
    found: list[Any] = [mark.body for mark in inproc.read(tmp_path)]
    kinds = {kind.__name__: [b for b in found if isinstance(b, kind)] for kind in {type(b) for b in found}}
    wanted = "Hello Arrived Tokenised Enqueued Queued Step Executed StepDone Output"
    assert set(wanted.split()) <= set(kinds)
    assert {(h.role, h.rank) for h in kinds["Hello"]} == {("server", 0), ("worker", 1)}
    assert [s.step for s in kinds["StepDone"]][:TOKENS] == list(range(1, TOKENS + 1))
    assert sum(e.graph == "full" for e in kinds["Executed"]) == 2 * (TOKENS - 1)
