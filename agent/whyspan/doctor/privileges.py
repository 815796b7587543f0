"""What this process, and the running collector, may do: namespaces and rights, gathered; `privilege_checks` judges."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from whyspan_probes.features import Features

from whyspan import cgroups

_PROC = Path("/proc")
#: linux/capability.h
BITS: Final = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_SYSLOG": 34,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
    "CAP_CHECKPOINT_RESTORE": 40,
}


class Rights(NamedTuple):
    """What one process may do; ``pid`` 0 is this one."""

    pid: int
    capabilities: frozenset[str]
    no_new_privileges: bool
    seccomp: int  # 0 none, 1 strict, 2 filter


class PrivilegeFacts(NamedTuple):
    """Namespaces and rights. ``collector`` is the running one, if it was found."""

    kernel: str
    own: Rights
    collector: Rights | None
    own_users: bool  # in a user namespace of its own, where capabilities do not count for the host
    host_pids: bool
    host_cgroups: bool
    clock_shift: bool  # in a time namespace whose monotonic clock differs from the kernel's
    uprobe_multi: bool
    root: bool
    profile: str  # AppArmor's, empty for none


def gather(features: Features, uprobe_multi: bool, collector: int = 0, proc: Path = _PROC) -> PrivilegeFacts:
    """Look at this process and at the collector, whose process id may be 0: it does not run.

    Joins the host's control group namespace if that is allowed, as the collector does.
    """
    own = _rights(0, proc)
    return PrivilegeFacts(
        features.kernel,
        own._replace(capabilities=own.capabilities | features.capabilities) if own else _NOTHING,
        _rights(collector, proc) if collector else None,
        _user_namespace(_text(proc / "self" / "uid_map")),
        features.host_pids,
        cgroups.join_host_namespace(),
        _clock_shifted(_text(proc / "self" / "timens_offsets")),
        uprobe_multi,
        os.geteuid() == 0,
        _profile(proc / "self" / "attr"),
    )


_NOTHING = Rights(0, frozenset(), False, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _rights(pid: int, proc: Path) -> Rights | None:
    text = _text(proc / (str(pid) if pid else "self") / "status")
    values = {k: v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}
    try:
        mask = int(values["CapEff"], 16)
        return Rights(
            pid,
            frozenset(name for name, bit in BITS.items() if mask >> bit & 1),
            values.get("NoNewPrivs") == "1",
            int(values.get("Seccomp", "0")),
        )
    except (KeyError, ValueError):
        return None


def _user_namespace(uid_map: str) -> bool:
    # user_namespaces(7): the initial one maps all ids to themselves.
    return uid_map.split() not in ([], ["0", "0", "4294967295"])


def _profile(attributes: Path) -> str:
    # proc_pid_attr(5); "docker-default (enforce)"
    text = _text(attributes / "apparmor" / "current") or _text(attributes / "current")
    name = text.strip("\0\n ")
    return name if name.endswith("(enforce)") else ""


def _clock_shifted(offsets: str) -> bool:
    # time_namespaces(7): "monotonic 0 0"; the kernel's own events do not follow the shift.
    for line in offsets.splitlines():
        name, *shift = line.split()
        if name in ("monotonic", "1") and any(part.lstrip("-").strip("0") for part in shift):
            return True
    return False
