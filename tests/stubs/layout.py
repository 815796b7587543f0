"""The simulated device's file for numpy, and what a new device is like."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.stubs import build

MAGIC = 0x57485950414E4750
DIRECTIONS = ("h2d", "d2h", "d2d", "h2h")
MEMORIES = ("pageable", "pinned")
MODES = ("sync", "async")
_SCALARS = {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "i32": "<i4", "i64": "<i8", "f64": "<f8"}

#: The order of magnitude of a current data-centre GPU and its driver.
CONTROL: dict[str, float] = {
    "kernel_ns": 10_000,
    "launch_host_ns": 2_000,
    "graph_launch_host_ns": 6_000,
    "call_host_ns": 800,
    "launch_latency_ns": 3_000,
    "launch_queue": 1024,
    "h2d_bps": 25_000_000_000,
    "d2h_bps": 25_000_000_000,
    "d2d_bps": 1_500_000_000_000,
    "pageable_bps": 8_000_000_000,
    "copy_latency_ns": 2_000,
    "alloc_host_ns": 60_000,
    "free_host_ns": 40_000,
    "pin_host_ns": 20_000,
    "pin_host_ns_per_mib": 250_000,
    "module_load_ns": 300_000,
    "jit_ns_per_kernel": 5_000_000,
    "lazy_load_ns": 50_000,
    "graph_instantiate_ns": 50_000,
    "graph_instantiate_ns_per_node": 2_000,
    "nccl_ns": 12_000,
    "nccl_bps": 200_000_000_000,
    "spill": 0,
    "spill_factor": 8.0,
}
GPU: dict[str, float] = {
    "memory_bytes": 80 << 30,
    "granule_bytes": 2 << 20,
    "clock_factor": 1.0,
    "link_factor": 1.0,
    "sm_clock_max_mhz": 1980,
    "mem_clock_max_mhz": 2619,
    "power_limit_mw": 700_000,
    "power_idle_mw": 70_000,
    "temperature_c": 45,
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "ecc_enabled": 1,
    "gpm_supported": 1,
    "nvlinks": 18,
    "nvlinks_active": (1 << 18) - 1,
    "sm_percent": -1,
}
XIDS = {
    31: "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f0a_00000000. Fault is of type FAULT_PDE",
    48: "DBE (double bit error) ECC Error",
    63: "Row Remapper: New row marked for remapping",
    74: "NVLink: fatal error detected on link 5",
    79: "GPU has fallen off the bus.",
    94: "Contained ECC error",
}


@cache
def dtype(struct: str) -> np.dtype[np.void]:
    """Return the record type of a struct of ``region.h``."""
    found = build.layout()[struct]
    names, formats, offsets = [], [], []
    for name, kind, count, offset in found["fields"]:
        names.append(name)
        offsets.append(offset)
        if kind == "char":
            formats.append(np.dtype(f"S{count}"))
        else:
            inner = np.dtype(_SCALARS[kind]) if kind in _SCALARS else dtype(kind.removeprefix("struct "))
            formats.append(np.dtype((inner, (count,))) if count else inner)
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": found["size"]}
    found_dtype: np.dtype[np.void] = np.dtype(layout)
    return found_dtype
