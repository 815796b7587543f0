"""What the agent takes, sampled: memory, descriptors and threads of each process, its files, what it counts as lost."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

#: Words of a command line that tell what a process of the agent is.
_ROLES = {
    "whyspan_exporters.exporter": "exporter",
    "whyspan.pipeline.collector": "collector",
    "whyspan.feeds": "feeds",
}
#: Lines of smaps_rollup. ``Pss_File`` is shared with every other process of the same libraries: it moves with them.
_MEMORY = ("Rss", "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
_STORE, _SPOOL = "whyspan.db", "otlp-spool.db"


def roles(supervisor: int) -> dict[str, int]:
    """Return the agent's processes by what they are; one that has just ended is left out."""
    found = {"supervisor": supervisor}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(supervisor).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                for part, role in _ROLES.items():
                    if part in words:
                        found[role] = process.pid
    return found


def process(pid: int) -> dict[str, int] | None:
    """Return memory (bytes), descriptors and threads of a process; None when it is gone."""
    out = {}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            if name in _MEMORY:
                out[name.lower()] = int(rest.split()[0]) << 10
        out["fds"] = len(os.listdir(f"/proc/{pid}/fd"))
        out["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    except (OSError, ValueError):
        return None
    return {"pid": pid, **out} if "pss" in out else None


def files(state: Path) -> dict[str, int]:
    """Return the sizes of all files of the state folder, in bytes."""
    out = {}
    for file in state.iterdir():
        with contextlib.suppress(OSError):
            out[file.name] = file.stat().st_size
    return out


def together(sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes of store and spool, their write-ahead logs included."""
    return {
        what: sum(size for name, size in sizes.items() if name in (base, f"{base}-wal"))
        for what, base in (("store", _STORE), ("spool", _SPOOL))
    }


class Store:
    """Reads the store again and again, as a user would: never in the way of who writes."""

    def __init__(self, state: Path) -> None:
        self._path, self._last = state / _STORE, 0
        self.found: dict[str, tuple[str, int, str]] = {}  # by id: trace, slow bits, cause

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
        try:
            yield db
        finally:
            db.close()

    def follow(self) -> None:
        """Take the findings that are new; they may be deleted later, at the store's bound."""
        with contextlib.suppress(sqlite3.Error), self._open() as db:
            query = "SELECT rowid, id, trace_id, slow, cause FROM findings WHERE rowid > ? ORDER BY rowid"
            for rowid, name, trace, slow, cause in db.execute(query, (self._last,)):
                self._last = rowid
                self.found[name] = (trace, slow, cause)

    def counters(self) -> list[tuple[str, str, str, int, int]]:
        """Return instance, name, label, value, time of its update (Unix ns) of all counters."""
        with contextlib.suppress(sqlite3.Error), self._open() as db:
            return db.execute("SELECT instance, name, label, value, updated_unix_ns FROM counters").fetchall()
        return []

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return what collectors and the exporter last said, by instance."""
        with contextlib.suppress(sqlite3.Error), self._open() as db:
            rows = db.execute("SELECT instance, status FROM status").fetchall()
            return {instance: json.loads(text) for instance, text in rows}
        return {}


def sample(supervisor: int, state: Path, store: Store) -> dict[str, Any]:
    """Return one line of the soak's record."""
    counted: dict[str, int] = {}
    for _, name, label, value, _ in store.counters():
        if name in ("lost_events", "not_explained", "requests"):
            key = f"{name}/{label}"
            counted[key] = counted.get(key, 0) + value
    sizes = files(state)
    told = store.statuses()
    exporter = told.pop("exporter", {})
    dropped = {i: int(s.get("findings_dropped", 0)) for i, s in told.items()}
    unwell = {
        p["name"]: p["state"]
        for s in told.values()
        for p in s.get("probes", ())
        if p.get("state") not in ("attached", "waiting")
    }
    processes = {role: got for role, pid in roles(supervisor).items() if (got := process(pid))}
    return {
        "unix_s": time.time(),
        "at_s": time.monotonic(),
        "processes": processes,
        "files": sizes,
        **together(sizes),
        "counted": counted,
        "findings_dropped": dropped,
        "pending": {i: int(s.get("findings_pending", 0)) for i, s in told.items()},
        "open_requests": {i: int(s.get("open_requests", 0)) for i, s in told.items()},
        "sinks": exporter.get("sinks", {}),
        "unwell": unwell,
        "load": os.getloadavg()[0],
    }
