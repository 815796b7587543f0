"""Doctor's whole answer: what was found, judged, as one value; and the exit status that it means.

``python -m whyspan.doctor.report`` prints the answer's JSON schema, docs/doctor.schema.json.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any, Final

import msgspec
from whyspan_probes.features import read_features
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.registry import discover
from whyspan_probes.state import ProbeState

from whyspan import __version__
from whyspan.config import Config
from whyspan.discovery import Discovery
from whyspan.doctor import (
    attach,
    host,
    install,
    kernel,
    network,
    place,
    privilege_checks,
    privileges,
    server_checks,
    servers,
    service,
)
from whyspan.doctor.check import Check, State, worst

#: Of the report's shape: raised when a field changes its meaning or goes; new fields and ids do not count.
VERSION: Final = 1
#: By the state of everything together. 1 is an error of doctor itself, 2 a wrong command line or configuration.
EXIT_STATUS: Final = {State.OK: 0, State.LIMITED: 3, State.FAILED: 4}


class Library(msgspec.Struct, frozen=True):
    """A file that a server maps; ``state`` is empty, or why it could not be reached."""

    path: str
    build_id: str
    deleted: bool
    state: str


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server found. ``vpid``: its number in its own PID namespace, 0 where that is the host's."""

    tgid: int
    service: str
    rule: str
    vpid: int
    container_id: str
    pod_uid: str
    runtime: str
    ports: list[int]
    maps: str
    libraries: list[Library]
    checks: list[Check]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``whyspan doctor --json`` prints. ``healthy``: the state is ok."""

    version: int
    whyspan: str
    node: str
    kernel: str
    machine: str
    state: State
    exit_status: int
    healthy: bool
    checks: list[Check]
    probes: list[ProbeState]
    engines: list[Server]


def make(config: Config, btf: KernelBtf, *, try_probes: bool, connect: bool) -> Report:
    """Look at everything, and judge it.

    Args:
        config: What the agent would run with.
        btf: The BTF to go by.
        try_probes: Attach all probes for a moment, if this process may.
        connect: Connect to the OTLP endpoints.
    """
    features = read_features()
    found = kernel.gather(features, btf._replace(own=features.btf))
    running = service.gather(config.store_path)
    rights = privileges.gather(features, not found.missing["uprobe.multi"], running.collector)
    checks = [
        *kernel.checks(found),
        *privilege_checks.checks(rights),
        *install.checks(install.gather()),
        *host.checks(host.gather()),
        *place.checks(place.gather(config)),
        *service.checks(running),
        *network.checks(network.gather(config, connect=connect)),
    ]
    probes = attach.states(discover(), features, btf._replace(own=features.btf), attach=try_probes)
    checks += attach.checks(probes)
    # Its services are named after the host's control groups, which `privileges.gather` has joined.
    engines = [_server(s) for s in servers.gather(Discovery(config.targets).scan()[0], features)]
    state = worst([*checks, *(c for e in engines for c in e.checks)])
    return Report(
        version=VERSION,
        whyspan=__version__,
        node=os.uname().nodename,
        kernel=features.kernel,
        machine=platform.machine(),
        state=state,
        exit_status=EXIT_STATUS[state],
        healthy=state is State.OK,
        checks=checks,
        probes=probes,
        engines=engines,
    )


def _server(f: servers.ServerFacts) -> Server:
    return msgspec.convert(servers.row(f) | {"checks": server_checks.checks(f)}, Server)


def schema() -> dict[str, Any]:
    """Return the JSON schema of the report (draft 2020-12)."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "whyspan doctor --json"}
    return head | msgspec.json.schema(Report)


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
