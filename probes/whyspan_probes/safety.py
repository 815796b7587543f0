"""Checks made before a user-space probe is attached to a process: it must not be able to harm it."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Final

from whyspan_probes import libraries
from whyspan_probes.features import kernel_version


def seccomp_mode(tgid: int, proc: Path = Path("/proc")) -> int:
    """Return the process's seccomp mode: 0 none, 1 strict, 2 filter; 0 when it is gone."""
    try:
        for line in (proc / str(tgid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("Seccomp:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def has_shadow_stack(tgid: int, proc: Path = Path("/proc")) -> bool:
    """Whether the process runs with a user shadow stack (x86 CET), which a return probe would break."""
    try:
        text = (proc / str(tgid) / "status").read_text(errors="replace")
    except OSError:
        return False
    return any(line.startswith("x86_Thread_features:") and "shstk" in line for line in text.splitlines())


#: Libraries that copy parts of a thread's stack away and back, under the feet of whoever is to return to them.
_MOVERS: Final = re.compile(r"/_greenlet[^/]*\.so")


def moves_stacks(tgid: int, proc: Path = Path("/proc")) -> str:
    """Return the library by which a process switches stacks that share one place (greenlet), or an empty string.

    The kernel keeps a thread's pending returns in order of its stack; a return that another stack was laid over is
    forgotten, and going there ends the process.
    """
    found = libraries.find(tgid, _MOVERS, proc)
    return found[0].name if found else ""


def refuse_user_probe(
    section: str,
    tgid: int,
    kernel: str,
    *,
    lockdown: str = "",
    machine: str = platform.machine(),
    proc: Path = Path("/proc"),
) -> str:
    """Return why a program of this section must not be attached to the process, or an empty string.

    Sources: a return probe is a system call since Linux 6.11, which kills seccomp-filtered targets until filters
    know it; single-stepping of a probed instruction has crashed arm64 targets; lockdown in confidentiality mode
    forbids reading memory from BPF.
    """
    kind = section.partition("/")[0].partition(".")[0]
    if kind not in {"uprobe", "uretprobe", "usdt"}:
        return ""
    if lockdown == "confidentiality":
        return "kernel lockdown (confidentiality) forbids reading memory"
    if kind == "uretprobe" and kernel_version(kernel) >= (6, 11) and seccomp_mode(tgid, proc):
        return f"process {tgid} is seccomp-filtered: a return probe could kill it"
    if kind == "uretprobe" and has_shadow_stack(tgid, proc):
        return f"process {tgid} has a shadow stack: a return probe would break it"
    if machine == "aarch64":
        return "user probes single-step on arm64: not proven safe"
    return ""
