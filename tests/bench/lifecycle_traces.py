"""What an agent that is gone may have left: in the kernel, among processes, in folders. Other agents may run beside.

A BPF object is *orphaned* when no descriptor of any process leads to it: a link to its program, a program to its maps.
What others hold is theirs, whatever it is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_KINDS = ("prog", "map", "link")
_ID = {f"{kind}_id": kind for kind in _KINDS}
# include/uapi/linux/bpf.h
_GET_INFO, _LINK_NEXT, _LINK_FD = 15, 31, 30
_LINK_UPROBE_MULTI, _MULTI_RETURN = 12, 1
_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_libc = ctypes.CDLL(None, use_errno=True)

Object = tuple[str, int]


class Kernel(NamedTuple):
    """All BPF objects: names by kind and id, and what each leads to."""

    names: dict[Object, str]
    leads: dict[Object, set[Object]]


def kernel() -> Kernel:
    """Ask bpftool for everything that is loaded."""
    names: dict[Object, str] = {}
    leads: dict[Object, set[Object]] = {}
    for kind in _KINDS:
        for o in _bpftool(kind):
            me = kind, int(o["id"])
            names[me] = o.get("name") or o.get("type", "")
            leads[me] = {("map", m) for m in o.get("map_ids", ())}
            if "prog_id" in o:
                leads[me].add(("prog", o["prog_id"]))
    return Kernel(names, leads)


def _bpftool(kind: str) -> list[dict[str, Any]]:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    done = subprocess.run(
        ["bpftool", kind, "show", "-j"], capture_output=True, check=False, env={**os.environ, "PATH": path}
    )
    # An object that goes while it is listed makes bpftool fail; what it has listed by then is lost.
    with contextlib.suppress(ValueError):
        found = json.loads(done.stdout or b"[]")
        return found if isinstance(found, list) else _bpftool(kind)
    return _bpftool(kind)


def held(pids: Iterable[int]) -> set[Object]:
    """Return the objects that these processes have descriptors of."""
    out = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, ValueError):
                    if "anon_inode:bpf" not in os.readlink(f"/proc/{pid}/fd/{fd}"):
                        continue
                    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines():
                        name, _, value = line.partition(":")
                        if name in _ID:
                            out.add((_ID[name], int(value)))
    return out


def reached(objects: Iterable[Object], kern: Kernel) -> set[Object]:
    """Return these objects and all that they lead to."""
    out: set[Object] = set()
    todo = list(objects)
    while todo:
        one = todo.pop()
        if one not in out:
            out.add(one)
            todo.extend(kern.leads.get(one, ()))
    return out


def pids() -> list[int]:
    """Return all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def orphans(ours: set[tuple[str, str]]) -> set[tuple[str, int, str]]:
    """Return objects with one of *ours* (kind, name) that nobody holds."""
    # Descriptors after the objects: one that is made in between is not listed.
    kern = kernel()
    alive = reached(held(pids()), kern)
    return {(*o, n) for o, n in kern.names.items() if o not in alive and (o[0], n) in ours}


def carrying(token: str) -> list[int]:
    """Return the processes that have *token* in their environment."""
    out = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                out.append(pid)
    return out


def return_probes() -> list[tuple[int, int]]:
    """Return (link, process) of every multi link at the return of functions; process 0: of everybody.

    Asked of the kernel, not of whoever made them. Sees nothing where `uprobe.multi` (6.6) or its link's information
    (6.8) is missing.
    """
    out, link = [], 0
    while (link := _next(link)) > 0:
        fd = _bpf(_LINK_FD, struct.pack("<I", link))
        if fd < 0:
            continue
        try:
            info = ctypes.create_string_buffer(128)
            attr = struct.pack("<IIQ", fd, len(info), ctypes.addressof(info))
            if _bpf(_GET_INFO, attr) == 0:
                kind = struct.unpack_from("<I", info.raw, 0)[0]
                # struct bpf_link_info.uprobe_multi: four pointers, path_size, count, flags, pid
                flags, pid = struct.unpack_from("<II", info.raw, 16 + 4 * 8 + 8)
                if kind == _LINK_UPROBE_MULTI and flags & _MULTI_RETURN:
                    out.append((link, pid))
        finally:
            os.close(fd)
    return out


def _next(link: int) -> int:
    attr = ctypes.create_string_buffer(struct.pack("<II", link, 0), 128)
    if _libc.syscall(_SYS_BPF[os.uname().machine], _LINK_NEXT, attr, 128):
        return 0
    return int(struct.unpack_from("<I", attr.raw, 4)[0])


def _bpf(command: int, attr: bytes) -> int:
    return int(
        _libc.syscall(_SYS_BPF[os.uname().machine], command, ctypes.create_string_buffer(attr, 128), 128)
    )
