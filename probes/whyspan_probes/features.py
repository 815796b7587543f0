"""What this kernel and these privileges allow; read-only, never raises."""

from __future__ import annotations

import errno
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

from whyspan_probes.btf import FUNC, TYPEDEF, Btf
from whyspan_probes.errors import LibbpfMissingError
from whyspan_probes.kernel_btf import OWN, KernelBtf

CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 12, 19, 21, 38, 39
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h: PROC_PID_INIT_INO
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
#: Its ``type`` is what perf_event_open wants for a uprobe: "tracing/uprobes: perf_uprobe" (4.17).
_PERF_UPROBE = Path("/sys/bus/event_source/devices/uprobe/type")
#: The same for a kprobe: "tracing/kprobe: Add PERF_TYPE_KPROBE" (4.17).
_PERF_KPROBE = Path("/sys/bus/event_source/devices/kprobe/type")
#: What the functions of system calls are called, by machine; see WHYSPAN_SYSCALL in whyspan.bpf.h.
_SYSCALL_PREFIX = {"x86_64": "__x64_sys_", "aarch64": "__arm64_sys_"}
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


def no_tracefs() -> str:
    """Return why `tracefs` found none."""
    for path in _TRACEFS:
        try:
            (path / "events").stat()
        except PermissionError:
            return "tracefs cannot be read: its folder is root's (CAP_DAC_READ_SEARCH)"
        except OSError:
            continue
    return "tracefs is not mounted"


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
        self._refused: dict[
            str, str
        ] = {}  # kinds of hooks that the kernel refused whatever the place, and why
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
        if self._error or kind in self._refused:
            return self._error or self._refused[kind]
        if kind == "tp_btf" and not self.kernel.own:
            return "the kernel has no BTF of its own"
        if kind in {"tp_btf", "raw_tp"}:
            return "" if self._has(target) else f"this kernel has no tracepoint {target}"
        if kind in {"tracepoint", "tp"}:
            root = tracefs()
            if not root:
                return no_tracefs()
            return "" if (Path(root) / "events" / target).is_dir() else f"no tracepoint {target}"
        if kind in {"fentry", "fexit"}:
            return self._missing_entry(target)
        if kind in {"kprobe", "kretprobe", "ksyscall", "kretsyscall"}:
            return self._missing_kprobe(kind, target)
        if kind in {"kprobe.multi", "kretprobe.multi"}:
            # CONFIG_FPROBE: Debian's 6.1 is without
            return "" if self._knows("register_fprobe_ips") else "this kernel has no kprobe.multi links"
        if kind in {"uprobe.multi", "uretprobe.multi"}:
            # "bpf: Add multi uprobe link" (6.6)
            known = not self._btf or "BPF_TRACE_UPROBE_MULTI" in self._btf.enum("bpf_attach_type")
            return "" if known else "this kernel has no uprobe.multi links"
        if kind == "perf_event":
            # Here only the samplers', whose loops are bpf_loop: "bpf: Add bpf_loop helper" (5.17)
            return "" if self._helps("loop") else "this kernel has no bpf_loop"
        if section == "iter.s/task" and not self.kernel.own:
            return "the kernel has no BTF of its own"
        if section == "iter.s/task":
            # "bpf: Add bpf_copy_from_user_task() helper" (5.18), "bpf: Parameterize task iterators." (6.1)
            known = not self._btf or bool(self._btf.enum("bpf_iter_task_type"))
            useful = known and self._helps("loop") and self._helps("copy_from_user_task")
            return "" if useful else "this kernel has no iterators over the threads of one process"
        if kind in {"uprobe", "uretprobe"}:
            return "" if _PERF_UPROBE.exists() or tracefs() else "neither perf uprobes nor tracefs"
        return ""

    def refuse(self, section: str, why: str) -> None:
        """Remember that the kernel refused a hook on grounds that hold for all of its kind."""
        self._refused[section.partition("/")[0]] = why

    def _missing_entry(self, function: str) -> str:
        if not self.kernel.own:
            return "the kernel has no BTF of its own"
        if not self._knows("register_ftrace_direct"):
            return "this kernel has no fentry (CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS)"
        return "" if self._knows(function) else f"this kernel has no function {function}"

    def _missing_kprobe(self, kind: str, target: str) -> str:
        root = tracefs()
        if not _PERF_KPROBE.exists() and not (root and (Path(root) / "kprobe_events").exists()):
            return "this kernel has no kprobes (CONFIG_KPROBE_EVENTS)"
        prefix = _SYSCALL_PREFIX.get(platform.machine(), "") if "syscall" in kind else ""
        return "" if self._knows(prefix + target) else f"this kernel has no function {prefix}{target}"

    def _knows(self, function: str) -> bool:
        """Whether the kernel has a function; without BTF the attempt tells."""
        return not self._btf or bool(self._btf.find(function, FUNC))

    def _helps(self, helper: str) -> bool:
        """Whether programs may call a function of BPF; without BTF the attempt tells."""
        return not self._btf or f"BPF_FUNC_{helper}" in self._btf.enum("bpf_func_id")

    def _has(self, tracepoint: str) -> bool:
        if self._btf and self._btf.find(f"btf_trace_{tracepoint}", TYPEDEF):
            return True
        root = tracefs()
        if not root:
            return not self._btf  # without both nothing is known: the attempt tells
        # That of a module (jbd2, say) is in the module's BTF.
        return any((group / tracepoint).is_dir() for group in (Path(root) / "events").iterdir())

    def close(self) -> None:
        """Free the kernel's BTF (several MB)."""
        if self._btf:
            self._btf.close()
            self._btf = None
            self._error = "hook table closed"
