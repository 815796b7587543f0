"""Facts read from /proc and the cgroup file systems, cleaned and bounded, for the batch they travel in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from whyspan import cgroups, containers
from whyspan.cgroups import Mount
from whyspan.model import CgroupFact, Fact, FdFact, ProcessFact, ThreadFact
from whyspan.text import clean

_MAX_NAME, _MAX_PATH = 64, 512
_MAX_SCANNED_FDS = 20_000


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def moved(known: ProcessFact, proc: Path = Path("/proc")) -> bool:
    """Return whether a process is in another cgroup or may use other CPUs than is known of it.

    A quick look (40 us) at what changes most; `process_fact` reads everything.
    """
    try:
        mask = _mask(os.sched_getaffinity(known.tgid))
    except OSError:
        return True
    return (_group(_read(proc / str(known.tgid) / "cgroup")), mask) != (known.cgroup, known.cpu_mask)


def _mask(cpus: set[int]) -> str:
    return f"{sum(1 << cpu for cpu in cpus):x}" if cpus else ""


def _group(groups: str) -> str:
    return clean(cgroups.cpu_path_in(groups), _MAX_PATH)


def process_fact(tgid: int, service: str, proc: Path = Path("/proc")) -> ProcessFact | None:
    """Return what /proc says of a process; None when it is gone."""
    folder = proc / str(tgid)
    comm = _read(folder / "comm")
    if not comm:
        return None
    try:
        exe = Path(os.readlink(folder / "exe")).name
    except OSError:
        exe = ""
    try:
        cpus = os.sched_getaffinity(tgid)
    except OSError:
        cpus = set()
    stat = _read(folder / "stat").rpartition(")")[2].split()
    groups = _read(folder / "cgroup")
    container = containers.of_paths(cgroups.paths_in(groups))
    return ProcessFact(
        tgid=tgid,
        comm=clean(comm, _MAX_NAME),
        exe=clean(exe, _MAX_NAME),
        service=service,
        cgroup=_group(groups),
        cpus_allowed=len(cpus),
        cpu_mask=_mask(cpus),
        cpu_count=os.cpu_count() or 0,
        start_ticks=int(stat[19]) if len(stat) > 19 else 0,
        vpid=_vpid(_read(folder / "status")),
        container_id=clean(container.id, _MAX_NAME),
        pod_uid=container.pod_uid,
        parent=int(stat[1]) if len(stat) > 1 else 0,
    )


def _vpid(status: str) -> int:
    """The number that the process has in its own PID namespace, 0 when that is ours."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            numbers = line.split()[1:]
            return int(numbers[-1]) if len(numbers) > 1 and numbers[-1].isdigit() else 0
    return 0


def thread_facts(tgid: int, known: set[int], limit: int = 256, proc: Path = Path("/proc")) -> list[Fact]:
    """Return the names of threads not in *known*, at most *limit* of them, and add these to it."""
    out: list[Fact] = []
    try:
        tids = [int(t) for t in os.listdir(proc / str(tgid) / "task")]
    except (OSError, ValueError):
        return out
    known.intersection_update(tids)  # threads that ended: their numbers come again, with other names
    for tid in tids:
        if tid in known:
            continue
        if len(out) >= limit:
            break
        name = _read(proc / str(tgid) / "task" / str(tid) / "comm")
        known.add(tid)
        if name:
            out.append(ThreadFact(tid, tgid, clean(name, _MAX_NAME)))
    return out


def cgroup_facts(path: str, mounts: Iterable[Mount]) -> list[Fact]:
    """Return the CPU quota of a cgroup and of each of its ancestors (v1 or v2), 0 where there is none."""
    found = cgroups.cpu_mounts(mounts)
    return [
        CgroupFact(clean(group, _MAX_PATH), *(cgroup_quota(group, found) or (0, 0)))
        for group in cgroups.ancestors(path)
    ]


def cgroup_quota(path: str, mounts: Iterable[Mount]) -> tuple[int, int] | None:
    """Return the CPU quota of one cgroup and its period, in us; None where it has none.

    *mounts* are those of `cgroups.cpu_mounts`.
    """
    for mount in mounts:
        folder = cgroups.folder(path, mount)
        if folder is None:
            continue
        if mount.version == 1:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            if quota.lstrip("-").isdigit() and period.isdigit():
                return (int(quota), int(period)) if int(quota) > 0 else None
        else:
            parts = _read(folder / "cpu.max").split()
            if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit():
                return int(parts[0]), int(parts[1])
    return None


def fd_fact(tgid: int, fd: int, inode: int, proc: Path = Path("/proc")) -> FdFact | None:
    """Return what a descriptor is on; None when it is closed or another file by now."""
    link = proc / str(tgid) / "fd" / str(fd)
    try:
        target = os.readlink(link)
        if _inode(tgid, fd, proc) != inode:
            return None
    except OSError:
        return None
    kind, _, rest = target.partition(":")
    if rest.startswith("["):
        kind = "eventfd" if rest == "[eventfd]" else {"pipe": "pipe", "socket": "socket"}.get(kind, "other")
    elif target.startswith("/dev/pts/") or target == "/dev/tty":
        kind = "tty"
    elif target.startswith("/"):
        kind = "file"
    else:
        kind = "other"
    peer_tgid, peer_comm = pipe_peer(tgid, inode, proc) if kind == "pipe" else (0, "")
    path = clean(target, _MAX_PATH) if kind in {"file", "tty"} else ""
    return FdFact(tgid, fd, inode, kind, path, peer_tgid, peer_comm)


def _inode(tgid: int, fd: int, proc: Path) -> int:
    """The inode number as the probes read it in the kernel.

    On an overlay, as containers have it, stat may say another number; fdinfo has the kernel's since Linux 5.14.
    """
    for line in _read(proc / str(tgid) / "fdinfo" / str(fd)).splitlines():
        name, _, value = line.partition(":")
        if name == "ino" and value.strip().isdigit():
            return int(value)
    return os.stat(proc / str(tgid) / "fd" / str(fd)).st_ino


def pipe_peer(tgid: int, inode: int, proc: Path = Path("/proc")) -> tuple[int, str]:
    """Return (tgid, name) of another process that has the pipe open for reading; (0, "") when none is seen.

    Looks at no more than 20,000 descriptors of the host.
    """
    wanted, looked = f"pipe:[{inode}]", 0
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == tgid:
            continue
        folder = proc / name / "fd"
        try:
            fds = os.listdir(folder)
        except OSError:
            continue
        for fd in fds:
            looked += 1
            if looked > _MAX_SCANNED_FDS:
                return 0, ""
            try:
                # O_RDONLY is no bit: the link of a descriptor open only for reading has no write permission.
                if os.readlink(folder / fd) == wanted and not os.lstat(folder / fd).st_mode & 0o200:
                    return int(name), clean(_read(proc / name / "comm"), _MAX_NAME)
            except OSError:
                continue
    return 0, ""
