"""Resource attributes: the host, the service that is watched and its process; and whyspan itself.

Who wins: the finding's own facts, then ``OTEL_RESOURCE_ATTRIBUTES``, then what is detected of the host.
"""

from __future__ import annotations

import platform
import socket
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from whyspan import __version__
from whyspan.model import Finding, ProcessFact
from whyspan.text import clean

Value = str | int
# Identities of one service: this host's agent speaks for several, so one environment cannot name them.
_NOT_FROM_ENV: Final = frozenset({"service.name", "service.instance.id"})
# Semantic conventions, service.instance.id: the namespace for ids derived from other stable ids.
_NAMESPACE: Final = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
# The convention's values of host.arch, where they are not what the kernel says.
_ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm32", "ppc64le": "ppc64", "i686": "x86"}
_MACHINE_ID: Final = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_DISTRO: Final[dict[str, Value]] = {
    "telemetry.distro.name": "whyspan",
    "telemetry.distro.version": __version__,
}


def host_attributes() -> dict[str, Value]:
    """Return what is known of this host."""
    machine = platform.machine()
    out: dict[str, Value] = {
        "host.name": clean(socket.gethostname(), 255),
        "host.arch": _ARCH.get(machine, machine),
        "os.type": "linux",
    }
    for path in _MACHINE_ID:
        try:
            machine_id = clean(path.read_text().strip(), 64)
        except OSError:
            continue
        if machine_id:
            out["host.id"] = machine_id
            break
    return out


class Resources:
    """Makes the resource of each finding; those of the same process are one object."""

    def __init__(self) -> None:
        """Look at the host and the environment, once."""
        env = OTELResourceDetector().detect().attributes
        self._base = host_attributes() | {
            k: v for k, v in env.items() if k not in _NOT_FROM_ENV and isinstance(v, str)
        }
        self._of = lru_cache(256)(self._make)

    def of(self, finding: Finding) -> Resource:
        """Return the resource of the service that served *finding*'s request.

        It has no ``telemetry.sdk.*``: these describe the service's own instrumentation, which this is not.
        """
        return self._of(finding.request.service, finding.request.tgid, finding.process)

    def of_service(self, service: str, tgid: int) -> Resource:
        """Return the resource of a service of which no request was explained."""
        return self._of(service, tgid, None)

    def whyspan(self) -> Resource:
        """Return the resource of whyspan's own metrics: one instance per host."""
        own: dict[str, Value] = {
            "service.name": "whyspan",
            "service.version": __version__,
            "service.instance.id": self._instance("whyspan"),
        }
        return Resource.create(self._base | own | _DISTRO)

    def _instance(self, *parts: object) -> str:
        host = self._base.get("host.id") or self._base["host.name"]
        return str(uuid.uuid5(_NAMESPACE, ":".join(str(p) for p in (host, *parts))))

    def _make(self, service: str, tgid: int, process: ProcessFact | None) -> Resource:
        out: dict[str, Value] = {
            "service.name": clean(service, 255) or "unknown_service",
            "service.instance.id": self._instance(service, tgid, process.start_ticks if process else 0),
            "process.pid": tgid,
        }
        if process is not None:
            texts = {
                "process.executable.name": process.exe or process.comm,
                "process.linux.cgroup": process.cgroup,
                "container.id": process.container_id,
                "k8s.pod.uid": process.pod_uid,
            }
            out |= {k: clean(v, 255) for k, v in texts.items() if v}
            if process.vpid:
                out["process.vpid"] = process.vpid
        return Resource(self._base | out | _DISTRO)
