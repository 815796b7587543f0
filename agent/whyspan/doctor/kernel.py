"""What the kernel offers: its release, its BTF, the kinds of hooks that it has."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from whyspan_probes.features import Features, HookTable, kernel_version
from whyspan_probes.kernel_btf import KernelBtf

from whyspan.doctor.check import Check, Subject

#: bpf_loop: "bpf: Add bpf_loop helper" (5.17).
OLDEST: Final = (5, 17)
_PROC = Path("/proc")
#: One section of each kind of hook, on a place that every kernel has.
_SECTIONS: Final = {
    "tp_btf": "tp_btf/sched_switch",
    "tracepoint": "tracepoint/sched/sched_switch",
    "syscalls": "tracepoint/syscalls/sys_enter_read",
    "fentry": "fentry/sock_sendmsg",
    "kprobe": "kprobe/sock_sendmsg",
    "uprobe.multi": "uprobe.multi/x",
    "uprobe": "uprobe/x",
}
_KPROBE_UNIT = Path("/sys/bus/event_source/devices/kprobe/type")


class KernelFacts(NamedTuple):
    """``missing`` has for each kind of hook why there is none, empty where there is."""

    features: Features
    btf: str  # where the layout of its structures comes from, empty: from nowhere
    own_btf: bool
    machine: str
    missing: Mapping[str, str]
    pressure: bool  # /proc/pressure can be read
    command_line: str


def gather(features: Features, kernel: KernelBtf, proc: Path = _PROC) -> KernelFacts:
    """Look at the running kernel; *kernel* is the BTF to go by."""
    table = HookTable(kernel)
    missing = {kind: table.missing(section) for kind, section in _SECTIONS.items()}
    table.close()
    if not missing["kprobe"] and not _KPROBE_UNIT.exists() and not _events(features.tracefs):
        missing["kprobe"] = "this kernel has no kprobes (CONFIG_KPROBE_EVENTS)"
    return KernelFacts(
        features,
        kernel.source,
        kernel.own,
        platform.machine(),
        missing,
        _readable(proc / "pressure" / "cpu"),
        _text(proc / "cmdline"),
    )


def _events(tracefs: str) -> bool:
    return bool(tracefs) and (Path(tracefs) / "kprobe_events").exists()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _readable(path: Path) -> bool:
    return bool(_text(path))  # psi=0 makes it EOPNOTSUPP


def checks(f: KernelFacts) -> list[Check]:
    """Judge them."""
    return [
        _version(f),
        _machine(f),
        _btf(f),
        _lockdown(f),
        _tracefs(f),
        _syscalls(f),
        _functions(f),
        _user_probes(f),
        _pressure(f),
    ]


def _version(f: KernelFacts) -> Check:
    it = Subject("kernel.version", "kernel")
    if kernel_version(f.features.kernel) >= OLDEST:
        return it.ok(f.features.kernel)
    return it.failed(f.features.kernel, "bpf_loop is missing: no probe loads", "run Linux 5.17 or newer")


def _machine(f: KernelFacts) -> Check:
    it = Subject("kernel.machine", "architecture")
    if f.machine == "x86_64":
        return it.ok(f.machine)
    if f.machine == "aarch64":
        return it.limited(
            f.machine,
            "user probes (HTTPS, markers, llama.cpp, Python's collector) are refused: not proven safe there",
            "none yet; everything that the kernel tells works",
        )
    return it.failed(f.machine, "there are probes for x86-64 and arm64 only", "use an x86-64 or arm64 host")


def _btf(f: KernelFacts) -> Check:
    it = Subject("kernel.btf", "BTF")
    if not f.btf:
        return it.failed(
            "none",
            "no probe loads",
            "boot a kernel with CONFIG_DEBUG_INFO_BTF=y, or name this kernel's BTF by --btf FILE (collector.btf)",
        )
    if not f.own_btf:
        return it.limited(
            f.btf,
            "typed tracepoints: raw ones are used, at one and a half to three times the cost",
            "boot a kernel with CONFIG_DEBUG_INFO_BTF=y",
        )
    return it.ok(f.btf)


def _lockdown(f: KernelFacts) -> Check:
    it = Subject("kernel.lockdown", "lockdown")
    if f.features.lockdown == "confidentiality":
        return it.failed(
            "confidentiality", "BPF may not read memory", "boot with lockdown=integrity, or none"
        )
    return it.ok(f.features.lockdown or "none")


def _tracefs(f: KernelFacts) -> Check:
    it = Subject("kernel.tracefs", "tracefs")
    if f.features.tracefs:
        return it.ok(f.features.tracefs)
    return it.limited(
        "not mounted, or not to be read by this user",
        "system-call tracepoints, with them the probes edges and descriptors where there is no other way",
        "mount -t tracefs tracefs /sys/kernel/tracing; grant CAP_DAC_READ_SEARCH to a user other than root",
    )


def _syscalls(f: KernelFacts) -> Check:
    it = Subject("kernel.syscall_tracepoints", "syscall tracepoints")
    why = f.missing["syscalls"]
    if not why:
        return it.ok("there")
    if not f.features.tracefs:
        return it.unknown(why, "see tracefs")
    return it.limited(
        why,
        "the first choice of the probes edges and descriptors",
        "boot a kernel with CONFIG_FTRACE_SYSCALLS=y",
    )


def _functions(f: KernelFacts) -> Check:
    it = Subject("kernel.functions", "function hooks")
    there = [kind for kind in ("fentry", "kprobe") if not f.missing[kind]]
    if there:
        return it.ok(f"{', '.join(there)}, as far as can be told without trying")
    # Tracepoints are what probes prefer; a function hook is the other way.
    why = "; ".join(dict.fromkeys((f.missing["fentry"], f.missing["kprobe"])))
    return it.note(
        f"none: {why}", "needed only where tracepoints are missing; a kernel with CONFIG_KPROBES=y has them"
    )


def _user_probes(f: KernelFacts) -> Check:
    it = Subject("kernel.user_probes", "user probes")
    if not f.missing["uprobe.multi"]:
        return it.ok("uprobe.multi")
    if not f.missing["uprobe"]:
        return it.note("perf uprobes", "Linux 6.6 has uprobe.multi, which needs no CAP_SYS_ADMIN")
    return it.limited(
        f.missing["uprobe"],
        "HTTPS, markers (engine steps), llama.cpp and Python's collector",
        "boot a kernel with CONFIG_UPROBE_EVENTS=y",
    )


def _pressure(f: KernelFacts) -> Check:
    it = Subject("kernel.pressure", "pressure (PSI)")
    if f.pressure:
        return it.ok("/proc/pressure")
    return it.limited(
        "none",
        "pressure on the page's host view and in metrics",
        "boot with psi=1 (and without psi=0); the kernel needs CONFIG_PSI=y",
    )
