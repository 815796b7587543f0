"""Which container a process is in, told from its cgroup paths: no runtime is asked. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

_SHORT: Final = 12  # digits, as the runtimes' own tools show them

# The last part of docker-ID.scope, cri-containerd-ID.scope, crio-ID, libpod-ID.scope, POD.slice:cri-containerd:ID, ID.
_HEX = re.compile(r"(?:^|[-_:])([0-9a-f]{64})(?:\.scope)?$")
# Fargate: the task's id and a number.
_FARGATE = re.compile(r"^[0-9a-f]{32}-[0-9]{4,}$")
# lxc.payload.NAME; also lxc/NAME and lxc.payload/NAME, see below. Its lxc.monitor.NAME is outside.
_LXC = re.compile(r"^lxc\.payload\.(.{1,64})$")
# podUID of the cgroupfs driver, ...-podUID.slice of systemd's, where "_" stands for "-"; a static pod's is a hash.
_POD = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice(?::.*)?)?$"
)


class Container(NamedTuple):
    """``id`` is the runtime's (64 hex digits, or LXC's name), ``pod_uid`` that of Kubernetes; empty: there is none."""

    id: str = ""
    pod_uid: str = ""


def identify(path: str) -> Container:
    """Return the innermost container and pod that a cgroup path names.

    The path may be seen from another cgroup namespace, and then begin with ``/..``.
    """
    parts = path.split("/")
    pod = next((m[1].replace("_", "-") for m in map(_POD.search, reversed(parts)) if m), "")
    for i in range(len(parts) - 1, -1, -1):
        part = parts[i]
        if "conmon-" in part:  # the monitor of a container, outside it
            break
        if found := _HEX.search(part):
            return Container(found[1], pod)
        if _FARGATE.search(part):
            return Container(part, pod)
        if found := _LXC.search(part):
            return Container(found[1], pod)
        if part and i and parts[i - 1] in ("lxc", "lxc.payload"):
            return Container(part[:64], pod)
    return Container("", pod)


def of_paths(paths: Iterable[str]) -> Container:
    """Return what the first telling one of a process's cgroup paths says: under v1 not all of them have to."""
    best = Container()
    for path in paths:
        found = identify(path)
        if found.id:
            return found
        best = best if best.pod_uid else found
    return best


def short(container_id: str) -> str:
    """Return a container id as people read it: twelve digits of a long one, a name as it is."""
    return container_id[:_SHORT] if re.match(r"[0-9a-f]{32}", container_id) else container_id
