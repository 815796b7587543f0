"""The faults of the stub engine: each leaves the sign that it is told by, and each decoy leaves none of them."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator

import numpy as np
import pytest

from tests.stubs import servers
from tests.stubs.device import Device
from tests.stubs.faults import DECOYS, FAULTS, Fault

ALONE = [f for f in (*FAULTS, *DECOYS) if not f.options and not f.fails]
OPTIONED = [f for f in (*FAULTS, *DECOYS) if f.options]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(gpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[servers.Served]:
    with servers.engine(device, "--sync", "blocking") as engine:
        engine.complete(2)
        yield engine


class Seen:
    """What was executed while something was so."""

    def __init__(self, device: Device, served: servers.Served, fault: Fault) -> None:
        before, kernels = device.counters(), device.kernels
        kernel_ns, steps = int(device.region["kernel_ns"]), len(served.steps())
        for _ in range(2):
            served.complete(4)
        after = device.counters()
        self.calls = {n: c.calls - (before[n].calls if n in before else 0) for n, c in after.items()}
        self.kernel_ns = (int(device.region["kernel_ns"]) - kernel_ns) / (device.kernels - kernels)
        self.steps = [s for s in served.steps()[steps:] if bool(s["prompts"]) == fault.first_step]

    def enqueuing_ms(self) -> float:
        """How long the host took, at least, until all of a step was enqueued."""
        return min(s["enqueued_ns"] - s["begin_ns"] for s in self.steps) / 1e6

    def step_ms(self) -> float:
        return min(s["end_ns"] - s["begin_ns"] for s in self.steps) / 1e6


#: Functions of which there are more calls than usual: what a probe can see.
MORE = {
    "item": "cuStreamSynchronize",
    "pageable": "cuMemcpyHtoD_v2",
    "churn": "cuMemFree_v2",
    "pin": "cuMemHostAlloc",
    "pin_elsewhere": "cuMemHostAlloc",
    "graph_miss": "cuLaunchKernel",
    "shared": "cuLaunchKernel",
    "module": "cuLibraryLoadData",
    "oom_retry": "cuMemFree_v2",
    "tiny": "cuLaunchKernel",
    "pooled": "cuMemAllocAsync",
    "capture": "cuGraphInstantiateWithFlags",
}
#: How much longer a kernel takes on average.
SLOWER = {"clocks": 1 / 0.3, "spill": 8.0}
#: What a step takes at least (ms), by the fault's own size.
AT_LEAST = {"cpu_bound": 8.0, "pin": 8.0, "link": 5.0, "own_kernel": 30.0, "module": 200.0}


@pytest.mark.parametrize("fault", ALONE, ids=lambda f: f.name)
def test_a_fault_leaves_its_sign(fault: Fault, device: Device, served: servers.Served) -> None:
    served.fault(**fault.usual)
    served.complete(4)
    usual = Seen(device, served, fault)
    with fault.on(device, served):
        if fault.name == "xid":
            assert served.complete(2) >= 1.0  # it stalls once
            return
        if fault.first_step or fault.hog is not None:
            served.complete(4)
        ill = Seen(device, served, fault)
    more = {n for n, calls in ill.calls.items() if calls > usual.calls.get(n, 0) and n.startswith("cu")}
    if fault.name in MORE:
        assert MORE[fault.name] in more
    elif fault.hog is None and not fault.engine:
        assert not more  # the same calls as ever
    if fault.name in SLOWER:
        assert ill.kernel_ns / usual.kernel_ns == pytest.approx(SLOWER[fault.name], rel=0.05)
    elif fault.name == "shared":
        assert ill.kernel_ns > 1.3 * usual.kernel_ns
    elif fault.name not in ("item", "module", "own_kernel", "tiny"):  # these have kernels of their own
        assert ill.kernel_ns == pytest.approx(usual.kernel_ns, rel=0.1)
    if fault.name in AT_LEAST:
        assert ill.step_ms() >= AT_LEAST[fault.name]
    if fault.name == "cpu_bound":
        assert ill.enqueuing_ms() >= 8.0


def test_memory_that_cannot_be_had_fails_the_request(served: servers.Served) -> None:
    fault = next(f for f in FAULTS if f.fails)
    served.fault(**fault.engine)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        served.complete(4)
    served.fault()
    served.complete(4)


@pytest.mark.parametrize(
    ("name", "function", "per_step"),
    [("straggler", "ncclAllReduce", 32), ("straggler_graph", "cuGraphLaunch", 1)],
)
def test_a_late_rank_enters_late(name: str, function: str, per_step: int, device: Device) -> None:
    fault = next(f for f in OPTIONED if f.name == name)
    with servers.engine(device, *fault.options) as served:
        served.fault(**fault.usual)
        served.complete(4)
        begin = time.monotonic_ns()
        with fault.on(device, served):
            served.complete(6)
        rows = device.calls(function)
        rows = rows[rows["begin_ns"] >= begin]
        ours = rows[rows["tgid"] == served.process.pid][-5 * per_step :: per_step]
        others = rows[rows["tgid"] != served.process.pid][-5 * per_step :: per_step]
    assert len(ours) == len(others) == 5
    assert np.all(others["begin_ns"] - ours["begin_ns"] >= 10_000_000)


def test_names_are_unique_and_decoys_say_what_they_look_like() -> None:
    names = [f.name for f in (*FAULTS, *DECOYS)]
    assert len(set(names)) == len(names)
    assert all(f.cause and not f.looks_like for f in FAULTS)
    assert all(f.looks_like and not f.cause for f in DECOYS)
