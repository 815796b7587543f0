"""Where control groups are: the paths in /proc/PID/cgroup, the file systems that show them, and the kernel's ids."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWCGROUP = 0x02000000  # include/uapi/linux/sched.h
_INITIAL_NAMESPACE = 0xEFFFFFFB  # include/linux/proc_ns.h: PROC_CGROUP_INIT_INO
_FILEID_KERNFS = 0xFE  # include/linux/exportfs.h
_HANDLE = struct.Struct("=IiQ")  # struct file_handle with the 8 bytes of a kernfs id


def join_host_namespace() -> bool:
    """Have this thread see cgroup paths as the host does, if it runs in a container and may (CAP_SYS_ADMIN).

    Nothing else changes. Returns whether paths are the host's now; if not, those of others begin with ``/..``, and
    their quotas are found only where the same part of the tree is mounted here.
    """
    try:
        if os.stat("/proc/self/ns/cgroup").st_ino == _INITIAL_NAMESPACE:
            return True
        # A kernel thread is always in it; of process 1 not even root may be able to tell.
        fd = os.open("/proc/2/ns/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(os.fstat(fd).st_ino == _INITIAL_NAMESPACE and _libc.setns(fd, _CLONE_NEWCGROUP) == 0)
    finally:
        os.close(fd)


class Mount(NamedTuple):
    """A mounted cgroup file system. ``root`` is the path, as /proc shows paths, of what lies at ``point``."""

    point: Path
    root: str
    version: int
    controllers: frozenset[str]


def mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """Return the cgroup file systems of this mount namespace; none when they cannot be read."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        controllers = frozenset(kind[2].split(",")) if version == 1 else frozenset[str]()
        out.append(Mount(Path(_unescape(fields[4])), _unescape(fields[3]), version, controllers))
    return out


def _unescape(text: str) -> str:
    for code in ("\\040", "\\011", "\\012"):
        text = text.replace(code, chr(int(code[1:], 8)))
    return text.replace("\\134", "\\")


def cpu_mounts(found: Iterable[Mount]) -> list[Mount]:
    """Return those that may show CPU quotas, the likelier first: version 1's CPU controller, then version 2."""
    one = [m for m in found if m.version == 1 and "cpu" in m.controllers]
    return one + [m for m in found if m.version == 2]


def folder(path: str, mount: Mount) -> Path | None:
    """Return where a cgroup lies under a mount; None when it lies outside of what is mounted.

    In a cgroup namespace of one's own both paths may begin with ``/..``.
    """
    ups, names = _split(path)
    root_ups, root_names = _split(mount.root)
    if ups != root_ups or names[: len(root_names)] != root_names or ".." in names:
        return None
    return mount.point.joinpath(*names[len(root_names) :])


def _split(path: str) -> tuple[int, list[str]]:
    parts = [p for p in path.split("/") if p not in ("", ".")]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return ups, parts[ups:]


def ancestors(path: str) -> list[str]:
    """Return a cgroup's path and those of all above it, as far as they have a name here; the root is ``/``."""
    ups, names = _split(path)
    top = "/" + "/".join([".."] * ups)
    return [str(PurePosixPath(top, *names[:n])) for n in range(len(names), -1, -1)] if path else []


def paths_in(text: str) -> list[str]:
    """Return the paths of a /proc/PID/cgroup, the CPU controller's first and version 2's last."""
    cpu, other, unified = _by_controller(text)
    return cpu + other + unified


def cpu_path_in(text: str) -> str:
    """Return the path of the CPU controller under version 1, else that of the unified tree; "" when there is none."""
    cpu, _, unified = _by_controller(text)
    return cpu[0] if cpu else unified[-1] if unified else ""


def memory_mounts(found: Iterable[Mount]) -> list[Mount]:
    """Return those that may show memory limits, the likelier first: version 1's memory controller, then version 2."""
    one = [m for m in found if m.version == 1 and "memory" in m.controllers]
    return one + [m for m in found if m.version == 2]


def memory_path_in(text: str) -> str:
    """Return the path of the memory controller under version 1, else that of the unified tree; "" for neither."""
    unified = ""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and "memory" in controllers.split(","):
            return path
        if colon and not controllers:
            unified = path
    return unified


def _by_controller(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of the CPU controller, of version 1's others and of version 2."""
    cpu: list[str] = []
    other: list[str] = []
    unified: list[str] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        (unified if not controllers else cpu if "cpu" in controllers.split(",") else other).append(path)
    return cpu, other, unified


def path_of_id(cgroup_id: int, found: Iterable[Mount], version: int = 2) -> str:
    """Return the path of the cgroup with this kernel id, as /proc shows paths, under the mounts of this version.

    Empty when it is gone, lies outside of what is mounted, or may not be looked up (CAP_DAC_READ_SEARCH).
    """
    for mount in found:
        if mount.version != version:
            continue
        handle = ctypes.create_string_buffer(_HANDLE.pack(8, _FILEID_KERNFS, cgroup_id), _HANDLE.size)
        try:
            at = os.open(mount.point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fd = _libc.open_by_handle_at(at, handle, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(at)
        if fd < 0:
            continue
        try:
            where = PurePosixPath(os.readlink(f"/proc/self/fd/{fd}"))
            return str(PurePosixPath(mount.root) / where.relative_to(mount.point))
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)
    return ""
