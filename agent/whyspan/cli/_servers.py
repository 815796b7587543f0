"""What ``doctor`` says of each server found: where it runs, and which libraries it maps that a probe may need."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from whyspan_probes.libraries import Library

    from whyspan.discovery import Found

#: Interpreter, C library, threads, TLS and device: by base name, whatever the version.
_OF_INTEREST = re.compile(
    r"/(libc[-.]|(libpython3|libuv|libgomp|libomp|libiomp5|libssl|libcuda|libcudart|libnccl|libtorch_cpu|libtorch_cuda"
    r"|libllama|libggml)[-.\d])[^/]*$"
)
_MAX_SERVERS = 64
_DIGITS = 8  # of a build id, in the table


def describe(found: Iterable[Found], proc: Path = Path("/proc")) -> list[dict[str, Any]]:
    """Return the servers as ``doctor --json`` has them; of more than 64, the others without their libraries."""
    from whyspan_probes import libraries

    from whyspan import hostfacts

    out = []
    for number, server in enumerate(found):
        fact = hostfacts.process_fact(server.tgid, server.service, proc)
        entry: dict[str, Any] = {
            "tgid": server.tgid,
            "service": server.service,
            "rule": server.rule,
            "vpid": fact.vpid if fact else 0,
            "container_id": fact.container_id if fact else "",
            "pod_uid": fact.pod_uid if fact else "",
            "maps": "",
            "libraries": [],
        }
        if number < _MAX_SERVERS:
            maps = libraries.mapped(server.tgid, proc)
            entry["maps"] = str(maps.state)
            files = [libraries.executable(server.tgid, proc)]
            files += libraries.find(server.tgid, _OF_INTEREST, proc, maps)
            entry["libraries"] = [_library(f) for f in files if f.path]
        out.append(entry)
    return out


def _library(library: Library) -> dict[str, Any]:
    from whyspan.text import clean

    return {
        "path": clean(library.path, 512),
        "build_id": library.build_id,
        "deleted": library.deleted,
        "state": str(library.state),
    }


def table(servers: Iterable[dict[str, Any]]) -> Table:
    """Return the servers as a table."""
    from rich.table import Table

    from whyspan.containers import short

    out = Table("process", "service", "found by", "container", "maps", box=None, pad_edge=False)
    for s in servers:
        where = short(s["container_id"]) or ("pod " + s["pod_uid"][:8] if s["pod_uid"] else "-")
        inside = f" ({s['vpid']} inside)" if s["vpid"] else ""
        maps = ", ".join(map(_words, s["libraries"])) or s["maps"] or "-"
        out.add_row(f"{s['tgid']}{inside}", s["service"], s["rule"], where, maps)
    return out


def _words(library: dict[str, Any]) -> str:
    name = library["path"].rpartition("/")[2]
    notes = [library["build_id"][:_DIGITS]] * bool(library["build_id"])
    notes += ["deleted"] * bool(library["deleted"]) + [library["state"]] * bool(library["state"])
    return f"{name} ({', '.join(notes)})" if notes else name
