"""What the host has for the agent: control groups, CPUs, memory, clocks, GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from whyspan import cgroups, pressure
from whyspan.cgroups import Mount
from whyspan.doctor.check import Check, Subject

_PROC, _SYS = Path("/proc"), Path("/sys")
#: What all agent processes may take, as README promises (PSS).
_MEMORY_MB: Final = 150
_STA_UNSYNC: Final = 0x0040  # linux/timex.h
_TIMEX_BYTES: Final = 256  # struct timex is 208
_DISPLAY_CLASS: Final = "0x03"  # pci_ids.h: PCI_BASE_CLASS_DISPLAY; accelerators have 0x12
_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD"}
#: Reading these costs microseconds each time, and every event does it. (Kernel: Documentation/timers/timekeeping.rst)
_SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies"})


class HostFacts(NamedTuple):
    """``synchronised`` None: the kernel does not tell."""

    cgroup_versions: frozenset[int]
    controllers: frozenset[str]
    cpus: int
    cpus_allowed: int
    memory_mb: int
    clock_source: str
    synchronised: bool | None
    gpus: tuple[str, ...]  # their vendors


def gather(proc: Path = _PROC, sys: Path = _SYS) -> HostFacts:
    """Look at the host."""
    mounts = cgroups.mounts(proc / "self" / "mountinfo")
    return HostFacts(
        frozenset(m.version for m in mounts),
        _controllers(mounts),
        os.cpu_count() or 0,
        len(os.sched_getaffinity(0)),
        pressure.memory(proc).get("available_bytes", 0) >> 20,
        _text(sys / "devices/system/clocksource/clocksource0/current_clocksource"),
        _synchronised(),
        tuple(_gpus(sys / "bus/pci/devices")),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _controllers(mounts: Iterable[Mount]) -> frozenset[str]:
    found: set[str] = set()
    for mount in mounts:
        found |= mount.controllers
        if mount.version == 2:
            found.update(_text(mount.point / "cgroup.controllers").split())
    return frozenset(found)


def _synchronised() -> bool | None:
    """Ask adjtimex(2), changing nothing; it needs no privilege."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        return None
    # modes (int), then offset, freq, maxerror, esterror (long), then status (int).
    word = ctypes.sizeof(ctypes.c_long)
    status = int.from_bytes(buffer.raw[5 * word : 5 * word + 4], "little")
    return not status & _STA_UNSYNC


def _gpus(devices: Path) -> Iterable[str]:
    try:
        found = sorted(devices.iterdir())
    except OSError:
        return
    for device in found:
        vendor = _VENDORS.get(_text(device / "vendor"))
        # The display class has also consoles of servers, but not by these two vendors.
        if vendor and _text(device / "class").startswith((_DISPLAY_CLASS, "0x12")):
            yield vendor


def checks(f: HostFacts) -> list[Check]:
    """Judge them."""
    return [_groups(f), _cpus(f), _memory(f), _source(f), _wall(f), _graphics(f)]


def _groups(f: HostFacts) -> Check:
    it = Subject("host.cgroups", "control groups")
    if not f.cgroup_versions:
        return it.limited(
            "not mounted here",
            "quotas, memory limits and containers of processes",
            "mount -t cgroup2 cgroup2 /sys/fs/cgroup (in a container: mount the host's /sys/fs/cgroup, read-only)",
        )
    found = f"version {' and '.join(map(str, sorted(f.cgroup_versions)))}"
    missing = [c for c in ("cpu", "memory") if c not in f.controllers]
    if missing:
        return it.limited(
            f"{found}, without the controller {' and '.join(missing)}",
            "quotas and limits that they set (throttling itself is seen by the kernel's scheduler)",
            "boot with the controllers on (no cgroup_disable=), or mount the host's /sys/fs/cgroup",
        )
    return it.ok(found)


def _cpus(f: HostFacts) -> Check:
    it = Subject("host.cpus", "CPUs")
    found = f"{f.cpus_allowed} of {f.cpus}" if f.cpus_allowed != f.cpus else str(f.cpus)
    if f.cpus_allowed == 1 and f.cpus > 1:
        return it.note(
            f"{found} for this process", "let the agent run on more than one CPU (CPUAffinity=, cpuset)"
        )
    return it.ok(found)


def _memory(f: HostFacts) -> Check:
    it = Subject("host.memory", "memory")
    if 0 < f.memory_mb < _MEMORY_MB:
        return it.limited(
            f"{f.memory_mb} MB available",
            f"the agent may take up to {_MEMORY_MB} MB: it or something else may be killed",
            "free memory, or lower collector.recorder_mb",
        )
    return it.ok(f"{f.memory_mb} MB available" if f.memory_mb else "not told")


def _source(f: HostFacts) -> Check:
    it = Subject("host.clock_source", "clock source")
    if f.clock_source in _SLOW_CLOCKS:
        return it.limited(
            f.clock_source,
            "cheap time stamps: probes cost several times more",
            "use tsc: boot with tsc=reliable if the hardware is sound",
        )
    return it.ok(f.clock_source or "not told")


def _wall(f: HostFacts) -> Check:
    it = Subject("host.time", "wall clock")
    if f.synchronised is None:
        return it.unknown("adjtimex(2) is refused", "see timedatectl")
    if f.synchronised:
        return it.ok("synchronised")
    return it.note(
        "not synchronised by a time service the kernel knows of",
        "run chrony or systemd-timesyncd: spans of several hosts line up in a trace only then",
    )


def _graphics(f: HostFacts) -> Check:
    it = Subject("host.gpus", "GPUs")
    if not f.gpus:
        return it.ok("none seen")
    kinds = ", ".join(f"{f.gpus.count(v)} {v}" for v in dict.fromkeys(f.gpus))
    return it.note(
        f"{kinds}; what they compute is not looked at yet: time spent waiting for them is shown as such"
    )
