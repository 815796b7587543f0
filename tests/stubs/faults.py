"""What can be wrong with the stub engine or its GPU, by cause; and decoys: what looks like a cause and is none.

The ground truth of a diagnosis on the stubs is here: nothing of it is told to the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.stubs import servers
from tests.stubs.device import Device

HW_THERMAL, SW_POWER_CAP = 0x40, 0x04


def _nothing(device: Device) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, or a decoy."""

    name: str
    #: Its id in the list of causes; empty: a decoy.
    cause: str
    engine: dict[str, Any] = field(default_factory=dict)  # model.Faults
    apply: Callable[[Device], None] = _nothing
    undo: Callable[[Device], None] = _nothing
    hog: tuple[str, ...] | None = None  # options of another job, if there is one
    #: Options of the engine, and what its steps do in the ordinary times that the fault is compared with.
    options: tuple[str, ...] = ()
    usual: dict[str, Any] = field(default_factory=dict)
    #: A cause that a decoy is easily taken for.
    looks_like: str = ""
    #: Whether a request takes longer than usual.
    harms: bool = True
    #: Only a new prompt's first step is slow.
    first_step: bool = False
    #: Requests fail.
    fails: bool = False

    @contextmanager
    def on(self, device: Device, served: servers.Served) -> Iterator[None]:
        """Have it for a while."""
        with ExitStack() as stack:
            if self.hog is not None:
                stack.enter_context(servers.hog(device, *self.hog))
            stack.callback(served.fault, **self.usual)
            stack.callback(self.undo, device)
            self.apply(device)
            served.fault(**(self.usual | self.engine))
            yield


def _gpu(**values: Any) -> Callable[[Device], None]:
    def change(device: Device) -> None:
        device.gpu(0, **values)

    return change


def _set(**values: float) -> Callable[[Device], None]:
    def change(device: Device) -> None:
        device.set(**values)

    return change


def _broken(device: Device) -> None:
    device.gpu(0, ecc_uncorrected=(1, 1), remap_pending=1)
    device.stall(1.5)
    device.xid(63)


def _mended(device: Device) -> None:
    device.gpu(0, ecc_uncorrected=(0, 0), remap_pending=0)


def _other_xid(device: Device) -> None:
    device.xid(63, len(device.region["gpus"]) - 1)


_TWO = ("--ranks", "2", "--sync", "blocking")

FAULTS = (
    Fault("item", "gpu.implicit_sync", {"items": 100}),
    Fault("pageable", "gpu.implicit_sync", {"pageable_kib": 16_384}),
    Fault("churn", "gpu.driver_memory", {"churn": 30}),
    Fault("pin", "gpu.driver_memory", {"pin_mib": 32}),
    Fault("pin_elsewhere", "gpu.driver_memory", {"churn": 1}, hog=("--pin", "128"), usual={"churn": 1}),
    Fault("graph_miss", "gpu.graph_miss", {"graph_up_to": 0}),
    Fault(
        "clocks",
        "gpu.clocks",
        apply=_gpu(clock_factor=0.3, throttle_reasons=HW_THERMAL, temperature_c=91),
        undo=_gpu(clock_factor=1.0, throttle_reasons=0, temperature_c=45),
    ),
    Fault("shared", "gpu.shared", hog=()),
    Fault("xid", "gpu.hardware_error", apply=_broken, undo=_mended),
    Fault(
        "link",
        "gpu.link",
        {"offload_mib": 32},
        apply=_gpu(pcie_width=4),
        undo=_gpu(pcie_width=16),
        usual={"offload_mib": 32},
    ),
    Fault("spill", "gpu.vram_spill", {"spill_mib": 80_000}, apply=_set(spill=1), undo=_set(spill=0)),
    Fault("module", "gpu.module_load", {"load_kernels": 40}, first_step=True),
    Fault("cpu_bound", "engine.cpu_bound_step", {"cpu_ms": 8.0}),
    # Collectives are called in every step, or were captured in a graph: then only its launch tells who is late.
    Fault("straggler", "engine.straggler", {"straggler_ms": 60.0}, options=_TWO, usual={"graph_up_to": 0}),
    Fault("straggler_graph", "engine.straggler", {"straggler_ms": 20.0}, options=_TWO),
    # The cache fills the GPU with blocks that do not fit: each prompt's first allocations fail, and are tried again.
    Fault(
        "oom_retry",
        "memory.oom",
        {"temporary_shifts": True},
        usual={"temporary_mib": 38_000},
        first_step=True,
    ),
    Fault("oom", "memory.oom", {"temporary_mib": 90_000}, fails=True),
)
DECOYS = (
    # A long wait that is the request's own GPU work.
    Fault("own_kernel", "", {"long_us": 30_000}, looks_like="gpu.implicit_sync"),
    Fault(
        "own_kernel_blocking",
        "",
        {"long_us": 30_000},
        options=("--sync", "blocking"),
        looks_like="gpu.implicit_sync",
    ),
    Fault("tiny", "", {"tiny": 100}, usual={"long_us": 5_000}, looks_like="gpu.graph_miss", harms=False),
    Fault("pooled", "", {"pooled": 20}, looks_like="gpu.driver_memory", harms=False),
    Fault("idle_job", "", hog=("--idle",), looks_like="gpu.shared", harms=False),
    Fault(
        "reason_only",
        "",
        apply=_gpu(throttle_reasons=SW_POWER_CAP),
        undo=_gpu(throttle_reasons=0),
        looks_like="gpu.clocks",
        harms=False,
    ),
    Fault(
        "corrected",
        "",
        apply=_gpu(ecc_corrected=(3, 41)),
        undo=_gpu(ecc_corrected=(0, 41)),
        looks_like="gpu.hardware_error",
        harms=False,
    ),
    Fault("offload", "", {"offload_mib": 4.0}, looks_like="gpu.link", harms=False),
    Fault("capture", "", {"capture": True}, looks_like="gpu.module_load", harms=False, first_step=True),
    # All ranks enter at once and the fabric is slow: no rank is late.
    Fault(
        "slow_fabric",
        "",
        options=_TWO,
        apply=_set(nccl_bps=20_000_000),
        undo=_set(nccl_bps=200_000_000_000),
        looks_like="engine.straggler",
    ),
)
