"""Facts of who observes: our own processes and probes, whoever traces a stopped thread; and of the host's CPUs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from whyspan_probes.loader import LoadedProbe
from whyspan_probes.schema import Events

from whyspan.model import Fact, HostCpuFact, OwnFact, ProbeCostFact, TracerFact
from whyspan.text import clean

_STOPPED = 0x0004 | 0x0008  # __TASK_STOPPED, __TASK_TRACED. Source: include/linux/sched.h
_MAX_LOOKS = 16  # at stopped threads, per batch
_MAX_KNOWN = 1024
_AGAIN_S = 1.0
_MAX_STATES = 16
_NVIDIA = "0x10de"


class Observed:
    """Makes the facts that rules on observers need."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._own: dict[int, str] = {}
        self._looked: OrderedDict[int, float] = OrderedDict()  # by thread, when its tracer was last looked up

    def own(self, tgids: Iterable[int]) -> list[Fact]:
        """Return facts of our own processes that are new."""
        out: list[Fact] = []
        for tgid in tgids:
            name = "whyspan"
            if self._own.get(tgid) != name:
                self._own[tgid] = name
                out.append(OwnFact(tgid, name))
        return out

    def tracers(self, outs: Events) -> list[Fact]:
        """Return who traces the threads that were stopped, each looked at once in a second.

        A tracer may have let its thread go by now: nothing is said then, and whoever woke it is left to go by.
        """
        if not len(outs):
            return []
        stopped = outs[(outs["aux"] & _STOPPED) != 0]
        out: list[Fact] = []
        now_s = time.monotonic()
        for tid in np.unique(stopped["tid"]).tolist():
            if now_s - self._looked.get(tid, -_AGAIN_S) < _AGAIN_S:
                continue
            if len(out) >= _MAX_LOOKS:
                break
            self._looked[tid] = now_s
            if len(self._looked) > _MAX_KNOWN:
                self._looked.popitem(last=False)
            tracer = _number_in(self._proc / str(tid) / "status", "TracerPid:")
            if tracer:
                tgid = _number_in(self._proc / str(tracer) / "status", "Tgid:") or tracer
                out.append(TracerFact(tid, tgid, clean(_read(self._proc / str(tgid) / "comm"), 64)))
        return out


def costs(probes: Iterable[LoadedProbe]) -> list[Fact]:
    """Return what a hit of each probe costs, of those that were measured."""
    return [
        ProbeCostFact(p.probe.name, p.state.ns_per_hit, tuple(t.name for t in p.types))
        for p in probes
        if p.state.ns_per_hit
    ]


def host_cpus(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> HostCpuFact:
    """Return what sysfs says of NUMA nodes, GPUs' nodes, idle states and the base frequency."""
    nodes = [d for d in sys.glob("devices/system/node/node[0-9]*") if d.is_dir()]
    idle = sorted(
        sys.glob("devices/system/cpu/cpu0/cpuidle/state[0-9]*"),
        key=lambda d: int(d.name.removeprefix("state")),
    )
    gpus = {
        int(node)
        for d in sys.glob("bus/pci/devices/*")
        if _read(d / "vendor") == _NVIDIA and _read(d / "class").startswith("0x03")
        if (node := _read(d / "numa_node")).isdigit()  # -1: not known
    }
    base = _read(sys / "devices/system/cpu/cpu0/cpufreq/base_frequency")
    return HostCpuFact(
        nodes=len(nodes),
        gpu_nodes=tuple(sorted(gpus)),
        balancing=_read(proc / "sys/kernel/numa_balancing") not in ("", "0"),
        idle_states=tuple(
            (clean(_read(d / "name"), 16), int(us) if (us := _read(d / "latency")).isdigit() else 0)
            for d in idle[:_MAX_STATES]
        ),
        base_khz=int(base) if base.isdigit() else 0,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number_in(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        if line.startswith(name):
            text = line.removeprefix(name).strip()
            return int(text) if text.isdigit() else 0
    return 0
