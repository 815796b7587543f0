"""Judges what this process, and the running collector, may do: namespaces, then each capability, then confinement."""

from __future__ import annotations

from typing import Final

from whyspan_probes.features import kernel_version

from whyspan.doctor.check import Check, Subject
from whyspan.doctor.privileges import PrivilegeFacts

_NO_LOCKED_LIMIT = (5, 11)  # since then the memory of maps counts for the control group


def checks(f: PrivilegeFacts) -> list[Check]:
    """Judge them: namespaces, then each capability, then the collector that runs."""
    out = [_users(f), _pids(f), _groups(f), _clock(f)]
    out += [_load(f), _other_processes(f), _files(f), _mappings(f), _admin(f), _symbols(f), _locked(f)]
    out += [_seccomp(f), _apparmor(f)]
    if f.collector is not None:
        out.append(_collector(f))
    return out


def _users(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.user_namespace", "user namespace")
    if not f.own_users:
        return it.ok("the host's")
    return it.failed(
        "one of its own",
        "capabilities do not count for the host: no program loads",
        "start it outside of user namespaces (no rootless container, no PrivateUsers=)",
    )


def _pids(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.pid_namespace", "process ids")
    if f.host_pids:
        return it.ok("the host's")
    return it.failed(
        "those of a PID namespace",
        "the kernel's events name other process ids: the agent refuses to start",
        "run this container with --pid=host (hostPID: true)",
    )


def _groups(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.cgroup_namespace", "cgroup namespace")
    if f.host_cgroups:
        return it.ok("the host's")
    return it.limited(
        "one of its own",
        "control group paths, quotas and containers of processes outside of it",
        "run the container with --cgroupns=host, or grant CAP_SYS_ADMIN and CAP_SYS_PTRACE so that it joins the host's",
    )


def _clock(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.time_namespace", "clock")
    if not f.clock_shift:
        return it.ok("the kernel's")
    return it.failed(
        "a time namespace's",
        "times of events and of the agent differ: nothing can be told",
        "start it outside of time namespaces",
    )


def _has(f: PrivilegeFacts, name: str) -> bool:
    return name in f.own.capabilities


def _load(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.load", "may load probes")
    both = [name for name in ("CAP_BPF", "CAP_PERFMON") if _has(f, name)]
    if len(both) == 2 or _has(f, "CAP_SYS_ADMIN"):
        return it.ok(" and ".join(both) if len(both) == 2 else "CAP_SYS_ADMIN")
    return it.failed(
        f"only {both[0]}" if both else "neither CAP_BPF nor CAP_PERFMON",
        "no program loads",
        "run as root, or grant CAP_BPF and CAP_PERFMON",
    )


def _other_processes(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.sys_ptrace", "may see processes")
    if _has(f, "CAP_SYS_PTRACE"):
        return it.ok("CAP_SYS_PTRACE")
    return it.limited(
        "no CAP_SYS_PTRACE",
        "HTTPS, markers, locks, Python's collector and names of files in servers of other users",
        "grant CAP_SYS_PTRACE (nothing is traced by ptrace with it)",
    )


def _files(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.dac_read_search", "may read files")
    if _has(f, "CAP_DAC_READ_SEARCH"):
        return it.ok("CAP_DAC_READ_SEARCH")
    if f.root:
        return it.note(
            "no CAP_DAC_READ_SEARCH, but root's files are its own", "grant it to see other users' files"
        )
    return it.limited(
        "no CAP_DAC_READ_SEARCH",
        "tracefs (root's only), names of control groups, libraries in folders that are closed to others",
        "grant CAP_DAC_READ_SEARCH",
    )


def _mappings(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.checkpoint_restore", "may open mappings")
    if _has(f, "CAP_SYS_ADMIN") or _has(f, "CAP_CHECKPOINT_RESTORE"):
        return it.ok("CAP_SYS_ADMIN" if _has(f, "CAP_SYS_ADMIN") else "CAP_CHECKPOINT_RESTORE")
    return it.limited(
        "neither CAP_CHECKPOINT_RESTORE nor CAP_SYS_ADMIN",
        "hooks in libraries that were replaced or deleted since their server began",
        "grant CAP_CHECKPOINT_RESTORE",
    )


def _admin(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.sys_admin", "may measure probes")
    if _has(f, "CAP_SYS_ADMIN"):
        return it.ok("CAP_SYS_ADMIN")
    lost = ["probes' cost figures: none is ever shed for its cost"]
    if not f.uprobe_multi:
        lost.append("all user probes (before Linux 6.6)")
    return it.limited("no CAP_SYS_ADMIN", "; ".join(lost), "grant CAP_SYS_ADMIN, or leave it so on purpose")


def _symbols(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.syslog", "kernel addresses")
    if _has(f, "CAP_SYSLOG"):
        return it.ok("CAP_SYSLOG")
    return it.note(
        "no CAP_SYSLOG: kernel functions on stacks of bursts may have no names", "grant CAP_SYSLOG"
    )


def _locked(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.memlock", "locked memory")
    if kernel_version(f.kernel) >= _NO_LOCKED_LIMIT or _has(f, "CAP_SYS_RESOURCE"):
        return it.ok("no limit applies to maps")
    return it.failed(
        "RLIMIT_MEMLOCK counts for maps before Linux 5.11", "rings may not fit", "grant CAP_SYS_RESOURCE"
    )


def _seccomp(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.seccomp", "seccomp")
    if not f.own.seccomp:
        return it.ok("no filter")
    return it.note(
        "this process is filtered", "if probes fail with EPERM: allow bpf and perf_event_open in the profile"
    )


def _apparmor(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.apparmor", "AppArmor")
    if not f.profile:
        return it.ok("not confined")
    return it.note(
        f.profile,
        "if servers cannot be looked into: --security-opt apparmor=unconfined (appArmorProfile: Unconfined)",
    )


#: What the collector lacks without each, most needed first.
_NEEDED: Final = ("CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYS_ADMIN")


def _collector(f: PrivilegeFacts) -> Check:
    it = Subject("privilege.collector", "running collector")
    assert f.collector is not None
    rights = f.collector
    missing = [name for name in _NEEDED if name not in rights.capabilities]
    what = f"process {rights.pid}: {', '.join(sorted(rights.capabilities)) or 'no capability'}"
    if not missing:
        return it.ok(what)
    return it.limited(
        what,
        f"what {', '.join(missing)} would give (doctor as root sees what root can do)",
        "systemctl edit whyspan: AmbientCapabilities= and CapabilityBoundingSet=",
    )
