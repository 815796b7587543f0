"""Facts read from /proc and the cgroup file systems, cleaned and bounded, for the batch they travel in."""

from __future__ import annotations

import os
from pathlib import Path

from whyspan.discovery import cgroup_of
from whyspan.model import CgroupFact, Fact, FdFact, ProcessFact, ThreadFact
from whyspan.text import clean

_CGROUP_V1 = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"))
_CGROUP_V2 = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_MAX_NAME, _MAX_PATH = 64, 512
_MAX_SCANNED_FDS = 20_000


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


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
        cpus = len(os.sched_getaffinity(tgid))
    except OSError:
        cpus = 0
    stat = _read(folder / "stat").rpartition(")")[2].split()
    return ProcessFact(
        tgid=tgid,
        comm=clean(comm, _MAX_NAME),
        exe=clean(exe, _MAX_NAME),
        service=service,
        cgroup=clean(cgroup_of(tgid, proc), _MAX_PATH),
        cpus_allowed=cpus,
        cpu_count=os.cpu_count() or 0,
        start_ticks=int(stat[19]) if len(stat) > 19 else 0,
    )


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


def cgroup_facts(path: str) -> list[Fact]:
    """Return the CPU quota of a cgroup and of each of its ancestors that has one (v1 or v2)."""
    out: list[Fact] = []
    while path:
        quota = _quota(path)
        if quota:
            out.append(CgroupFact(clean(path, _MAX_PATH), *quota))
        else:
            out.append(CgroupFact(clean(path, _MAX_PATH), 0, 0))
        if path == "/":
            break
        path = path.rpartition("/")[0] or "/"
    return out


def _quota(path: str) -> tuple[int, int] | None:
    relative = path.lstrip("/")
    for root in _CGROUP_V1:
        quota = _read(root / relative / "cpu.cfs_quota_us")
        period = _read(root / relative / "cpu.cfs_period_us")
        if quota.lstrip("-").isdigit() and period.isdigit():
            return (int(quota), int(period)) if int(quota) > 0 else None
    for root in _CGROUP_V2:
        parts = _read(root / relative / "cpu.max").split()
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit():
            return int(parts[0]), int(parts[1])
    return None


def fd_fact(tgid: int, fd: int, inode: int, proc: Path = Path("/proc")) -> FdFact | None:
    """Return what a descriptor is on; None when it is closed or another file by now."""
    link = proc / str(tgid) / "fd" / str(fd)
    try:
        target = os.readlink(link)
        if os.stat(link).st_ino != inode:
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
