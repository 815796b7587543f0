"""What this kernel and these privileges allow; read-only, never raises."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from whyspan_probes.btf import TYPEDEF, Btf
from whyspan_probes.errors import LibbpfMissingError

CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 12, 19, 21, 38, 39
KERNEL_BTF = Path("/sys/kernel/btf/vmlinux")
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
_TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


class Features(NamedTuple):
    """Facts about the host that decide what can attach."""

    kernel: str
    btf: bool
    lockdown: str  # none, integrity, confidentiality, or "" when the kernel has no lockdown
    tracefs: str  # where it is mounted, or ""
    capabilities: frozenset[str]

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
        btf=KERNEL_BTF.exists(),
        lockdown=lockdown,
        tracefs=tracefs(),
        capabilities=_effective_capabilities(),
    )


class HookTable:
    """Answers whether the kernel has a hook, so that the reason can be given before anything is tried."""

    def __init__(self) -> None:
        self._btf: Btf | None = None
        self._error = ""
        try:
            self._btf = Btf.of_kernel()
        except OSError as e:
            self._error = f"no kernel BTF ({os.strerror(e.errno or errno.ENOENT)})"
        except LibbpfMissingError as e:
            self._error = str(e)

    def missing(self, section: str) -> str:
        """Return why a program of this ELF section cannot attach here, or an empty string.

        Only what can be known without loading: a hook that exists may still be refused.
        """
        kind, _, target = section.partition("/")
        if self._error:
            return self._error
        if kind in {"tp_btf", "raw_tp"} and self._btf:
            return (
                ""
                if self._btf.find(f"btf_trace_{target}", TYPEDEF)
                else f"this kernel has no tracepoint {target}"
            )
        if kind in {"tracepoint", "tp"}:
            root = tracefs()
            if not root:
                return "tracefs is not mounted"
            return "" if (Path(root) / "events" / target).is_dir() else f"no tracepoint {target}"
        return ""

    def close(self) -> None:
        """Free the kernel's BTF (several MB)."""
        if self._btf:
            self._btf.close()
            self._btf = None
            self._error = "hook table closed"
