"""What this kernel and these privileges allow; read-only, never raises."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from whyspan_probes.btf import TYPEDEF, Btf
from whyspan_probes.errors import LibbpfMissingError
from whyspan_probes.kernel_btf import OWN, KernelBtf

CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 12, 19, 21, 38, 39
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h: PROC_PID_INIT_INO
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
#: Its ``type`` is what perf_event_open wants for a uprobe: "tracing/uprobes: perf_uprobe" (4.17).
_PERF_UPROBE = Path("/sys/bus/event_source/devices/uprobe/type")
_TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


class Features(NamedTuple):
    """Facts about the host that decide what can attach."""

    kernel: str
    btf: bool
    lockdown: str  # none, integrity, confidentiality, or "" when the kernel has no lockdown
    tracefs: str  # where it is mounted, or ""
    capabilities: frozenset[str]
    host_pids: bool = True  # process ids here are those that the kernel's events carry

    @property
    def may_load(self) -> bool:
        """Whether tracing programs may be loaded at all."""
        return "CAP_SYS_ADMIN" in self.capabilities or {"CAP_BPF", "CAP_PERFMON"} <= self.capabilities


def kernel_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a release string; (0, 0) when it has none."""
    m = re.match(r"(\d+)\.(\d+)", text)
    return (int(m[1]), int(m[2])) if m else (0, 0)


def _effective_capabilities() -> frozenset[str]:
    names = {
        "CAP_NET_ADMIN": CAP_NET_ADMIN,
        "CAP_SYS_PTRACE": CAP_SYS_PTRACE,
        "CAP_SYS_ADMIN": CAP_SYS_ADMIN,
        "CAP_PERFMON": CAP_PERFMON,
        "CAP_BPF": CAP_BPF,
    }
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return frozenset(n for n, bit in names.items() if mask >> bit & 1)
    return frozenset()


def tracefs() -> str:
    """Return where tracefs is mounted and readable, or an empty string."""
    for path in _TRACEFS:
        try:
            if (path / "events").is_dir():
                return str(path)
        except OSError:
            continue
    return ""


def read_features() -> Features:
    """Look at the running host."""
    try:
        chosen = re.search(r"\[(\w+)\]", _LOCKDOWN.read_text())
        lockdown = chosen[1] if chosen else ""
    except OSError:
        lockdown = ""
    return Features(
        kernel=os.uname().release,
        btf=OWN.exists(),
        lockdown=lockdown,
        tracefs=tracefs(),
        capabilities=_effective_capabilities(),
        host_pids=in_host_pid_namespace(),
    )


def in_host_pid_namespace() -> bool:
    """Whether this process is in the initial PID namespace; True also when that cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return True


class HookTable:
    """Answers whether the kernel has a hook, so that the reason can be given before anything is tried."""

    def __init__(self, kernel: KernelBtf | None = None) -> None:
        """*kernel*: the BTF to go by; default: what the running kernel has."""
        self.kernel = kernel or KernelBtf.find()
        self._btf: Btf | None = None
        self._error = ""
        try:
            self._btf = Btf.of_kernel()  # of a kernel without, libbpf may still find a file under /boot
        except OSError as e:
            if self.kernel.file is None:
                self._error = f"no kernel BTF ({os.strerror(e.errno or errno.ENOENT)}): name a file by --btf"
        except LibbpfMissingError as e:
            self._error = str(e)

    def missing(self, section: str) -> str:
        """Return why a program of this ELF section cannot attach here, or an empty string.

        Only what can be known without loading: a hook that exists may still be refused.
        """
        kind, _, target = section.partition("/")
        if self._error:
            return self._error
        if kind == "tp_btf" and not self.kernel.own:
            return "the kernel has no BTF of its own"
        if kind in {"tp_btf", "raw_tp"}:
            return "" if self._has(target) else f"this kernel has no tracepoint {target}"
        if kind in {"tracepoint", "tp"}:
            root = tracefs()
            if not root:
                return "tracefs is not mounted"
            return "" if (Path(root) / "events" / target).is_dir() else f"no tracepoint {target}"
        if kind in {"uprobe.multi", "uretprobe.multi"}:
            # "bpf: Add multi uprobe link" (6.6)
            known = not self._btf or "BPF_TRACE_UPROBE_MULTI" in self._btf.enum("bpf_attach_type")
            return "" if known else "this kernel has no uprobe.multi links"
        if kind in {"uprobe", "uretprobe"}:
            return "" if _PERF_UPROBE.exists() or tracefs() else "neither perf uprobes nor tracefs"
        return ""

    def _has(self, tracepoint: str) -> bool:
        if self._btf:
            return bool(self._btf.find(f"btf_trace_{tracepoint}", TYPEDEF))
        root = tracefs()
        # Without both nothing is known: the attempt tells.
        return not root or any((group / tracepoint).is_dir() for group in (Path(root) / "events").iterdir())

    def close(self) -> None:
        """Free the kernel's BTF (several MB)."""
        if self._btf:
            self._btf.close()
            self._btf = None
            self._error = "hook table closed"
