"""The simulated GPU that the stub libraries run on: make one, change it while programs run, read what was executed.

``with Device() as device: subprocess.run(..., env=device.env)``. Times are in nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from tests.stubs import build
from tests.stubs.layout import CONTROL, DIRECTIONS, GPU, MAGIC, MEMORIES, MODES, XIDS, dtype

SHARED = "/dev/shm"


class Counter(NamedTuple):
    """What was executed of one function."""

    calls: int
    errors: int  # neither success nor "not ready"
    time_ns: int  # from entry to return
    wait_ns: int  # of that, waiting for the device, or for another process


class Copies(NamedTuple):
    """Copies of one direction, kind of host memory and mode."""

    number: int
    bytes: int


class Device:
    """A file that simulates one or more GPUs for all processes that use the stubs."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        gpus: int = 1,
        ring: int = 65_536,
        log: Path | None = None,
        **values: float,
    ) -> None:
        """Make the device.

        Args:
            path: Its file; default: a temporary one, removed by ``close``.
            gpus: How many GPUs, all alike.
            ring: How many of the last calls are kept, a power of two.
            log: Where Xid lines go, in the format of /dev/kmsg; default: a temporary file.
            values: Keys of ``CONTROL`` and ``GPU`` that differ from there.

        Raises:
            ValueError: a size out of bounds, or a value that does not exist.
        """
        region = dtype("region")
        if ring & (ring - 1) or not 0 < gpus <= len(np.zeros((), region)["gpus"]):
            raise ValueError("ring must be a power of two, gpus between 1 and 8")
        # In memory: what is counted in it must not become writes to a disk.
        shared = SHARED if os.access(SHARED, os.W_OK) else None
        self._folder = None if path else tempfile.TemporaryDirectory(prefix="stub-device-", dir=shared)
        self.path = path or Path(self._folder.name if self._folder else "") / "device"
        self.log = log or self.path.with_suffix(".kmsg")
        self.log.touch()
        size = region.itemsize + ring * dtype("call").itemsize
        with self.path.open("w+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self.region: Any = np.ndarray((1,), region, self._map)[0]
        self._ring: Any = np.ndarray((ring,), dtype("call"), self._map, region.itemsize)
        self.region["size"] = size
        self.region["devices"] = gpus
        self.region["ring_size"] = ring
        self.set(**(CONTROL | {k: v for k, v in values.items() if k not in GPU}))
        for i in range(gpus):
            self.gpu(i, **(GPU | {k: v for k, v in values.items() if k in GPU}))
            self.region["gpus"][i]["name"] = b"NVIDIA H100 80GB HBM3"
            self.region["gpus"][i]["pci"] = f"0000:{0x41 + i:02x}:00.0".encode()
            self.region["gpus"][i]["uuid"] = np.frombuffer(
                uuid.uuid5(uuid.NAMESPACE_DNS, f"gpu{i}").bytes, "u1"
            )
        self.region["magic"] = MAGIC  # last: now it may be used

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files; processes that still use the device keep it."""
        if self._folder:
            self._folder.cleanup()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a program that is to find the stubs instead of the real libraries."""
        folders = [str(build.libraries()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join(folders),
            "WHYSPAN_STUB_DEVICE": str(self.path),
        }

    # -- control --------------------------------------------------------------------------------------------------

    def set(self, **values: float) -> None:
        """Change values of control (keys of ``CONTROL``).

        Raises:
            ValueError: there is no such value.
        """
        for name, value in values.items():
            if name not in CONTROL:
                raise ValueError(f"the device has no value {name!r}")
            self.region["control"][name] = value
        self.region["control"]["generation"] += 1

    def gpu(self, index: int = 0, **values: Any) -> Any:
        """Change values of a GPU (fields of ``struct gpu``); return all of them."""
        gpu = self.region["gpus"][index]
        for name, value in values.items():
            gpu[name] = value
        return gpu

    def rules(self, rules: Iterable[tuple[str, float] | tuple[str, float, float]]) -> None:
        """Say how long kernels take: (pattern, us[, us per block]); the first pattern found in the name counts.

        Raises:
            ValueError: too many, or too long a pattern.
        """
        table = self.region["control"]["rules"]
        rows = [(*rule, 0.0)[:3] for rule in rules]
        if len(rows) > len(table) or any(len(row[0].encode()) > 95 for row in rows):
            raise ValueError("at most 64 rules of 95 bytes")
        table["pattern"] = b""
        for i, (pattern, us, us_per_block) in enumerate(rows):
            table[i] = (pattern.encode(), round(us * 1e3), round(us_per_block * 1e3))
        self.region["control"]["generation"] += 1

    def fail(self, function: str, code: int, times: int = -1) -> None:
        """Have a function return an error so many times (-1: until ``heal``) without doing anything."""
        control = self.region["control"]
        control["fails"][int(control["fails_set"])] = (function.encode(), times, code, 0)
        control["fails_set"] += 1

    def heal(self) -> None:
        """Take all failures back."""
        self.region["control"]["fails_set"] = 0

    def stall(self, seconds: float, index: int = 0) -> None:
        """Nothing more starts on the GPU for a while."""
        self.region["gpus"][index]["stall_until_ns"] = time.monotonic_ns() + round(seconds * 1e9)

    def xid(self, code: int, index: int = 0, *, pid: int = 0, name: str = "") -> str:
        """Report an Xid to NVML and to the kernel log; return the line of the log."""
        region, number = self.region, int(self.region["xid_count"])
        now = time.monotonic_ns()
        region["xids"][number % len(region["xids"])] = (now, index, code)
        region["xid_count"] = number + 1
        pci = bytes(region["gpus"][index]["pci"]).decode().rsplit(".", 1)[0]
        who = f"pid={pid}, name={name or '<unknown>'}" if pid else "pid='<unknown>', name=<unknown>"
        text = f"NVRM: Xid (PCI:{pci}): {code}, {who}, {XIDS.get(code, 'error')}"
        with self.log.open("a") as log:
            log.write(f"3,{number + 1},{now // 1000},-;{text}\n")
        return text

    # -- what was executed ----------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Counter]:
        """Return the exact account of each function that was called, by name.

        Raises:
            RuntimeError: more functions than the table has room for.
        """
        funcs = self.region["funcs"]
        if funcs[0]["calls"]:
            raise RuntimeError("MAX_FUNCTIONS is too small")
        rows = funcs[1 : int(self.region["functions"]) + 1]
        return {
            bytes(row["name"]).decode(): Counter(*(int(row[key]) for key in Counter._fields))
            for row in rows
            if row["calls"]
        }

    def count(self, *functions: str) -> int:
        """Return how often functions were called, together."""
        found = self.counters()
        return sum(found[name].calls for name in functions if name in found)

    def copies(self) -> dict[tuple[str, str, str], Copies]:
        """Return copies by (h2d|d2h|d2d|h2h, pageable|pinned, sync|async)."""
        keys = [(d, m, a) for d in DIRECTIONS for m in MEMORIES for a in MODES]
        counts, sizes = self.region["copies"], self.region["copy_bytes"]
        return {key: Copies(int(counts[i]), int(sizes[i])) for i, key in enumerate(keys) if counts[i]}

    def names(self) -> list[str]:
        """Return the functions' names; a call's ``function`` is an index."""
        return [
            bytes(row).decode() for row in self.region["funcs"]["name"][: int(self.region["functions"]) + 1]
        ]

    def calls(self, *functions: str) -> Any:
        """Return the last calls in the order of their return: records of ``struct call``.

        Args:
            functions: Only those; default: all.
        """
        found = self._ring.copy()
        found = found[found["seq"] > 0]
        found = found[np.argsort(found["seq"])]
        if functions:
            names = self.names()
            found = found[np.isin(found["function"], [names.index(f) for f in functions if f in names])]
        return found

    @property
    def kernels(self) -> int:
        """Kernels run, those of graphs included."""
        return int(self.region["kernels"])

    @property
    def graph_kernels(self) -> int:
        """Kernels run by graphs."""
        return int(self.region["graph_kernels"])

    def used_bytes(self, index: int = 0) -> int:
        """Return the memory in use on a GPU."""
        gpu = self.region["gpus"][index]
        return int(gpu["used_granules"]) * int(gpu["granule_bytes"])

    def processes(self, index: int = 0) -> dict[int, int]:
        """Return the bytes in use by process id."""
        granule = int(self.region["gpus"][index]["granule_bytes"])
        return {int(p["pid"]): int(p["granules"][index]) * granule for p in self.region["procs"] if p["pid"]}
