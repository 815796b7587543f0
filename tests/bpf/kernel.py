"""What BPF objects the kernel holds, by bpftool."""

from __future__ import annotations

import json
import os
import subprocess


def objects(kind: str) -> dict[int, str]:
    """Return the names (or kinds) of all loaded ``prog``, ``link`` or ``map`` objects by id."""
    done = subprocess.run(
        ["bpftool", kind, "show", "-j"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"},
    )
    return {o["id"]: o.get("name") or o.get("type", "") for o in json.loads(done.stdout or "[]")}


def held_by(tgid: int) -> set[tuple[str, int]]:
    """Return (kind, id) of the BPF programs, links and maps that a process holds descriptors of."""
    out = set()
    for fd in os.listdir(f"/proc/{tgid}/fdinfo"):
        try:
            with open(f"/proc/{tgid}/fdinfo/{fd}") as f:
                fields = dict(line.split(":", 1) for line in f if ":" in line)
        except OSError:
            continue
        for key, kind in (("link_id", "link"), ("map_id", "map")):
            if key in fields:
                out.add((kind, int(fields[key])))
        if "prog_id" in fields:
            out.add(("prog", int(fields["prog_id"])))
    return out
