"""Where the agent keeps its files: the state folder, the store, the spool, the room that is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from whyspan_exporters.sharing import GROUP

from whyspan.config import Config
from whyspan.doctor.check import Check, Subject
from whyspan.errors import ConfigError

_MB: Final = 1 << 20


class PlaceFacts(NamedTuple):
    """Sizes in bytes. ``problem`` of the socket's path, else empty."""

    folder: Path
    exists: bool
    writable: bool  # by this process
    makeable: bool  # a folder above it exists and can be written to
    mode: int
    group: str
    has_group: bool  # the group whyspan exists
    store: Path
    store_bytes: int  # with its write-ahead log; -1: there is none
    store_max_bytes: int
    store_readable: bool
    spool_bytes: int
    spool_max_bytes: int
    free_bytes: int
    socket_problem: str


def gather(config: Config) -> PlaceFacts:
    """Look at the folders that the configuration names; nothing is made."""
    folder, store = config.state_dir, config.store_path
    mode, group = _owner(folder)
    try:
        _, problem = config.socket_path, ""
    except ConfigError as e:
        problem = str(e)
    above = _above(folder)
    spool = _size(config.spool_path)
    return PlaceFacts(
        folder,
        _is_dir(folder),
        os.access(folder, os.W_OK | os.X_OK, effective_ids=True),
        os.access(above, os.W_OK | os.X_OK, effective_ids=True),
        mode,
        group,
        _has_group(),
        store,
        _size(store),
        config.store.max_mb * _MB,
        os.access(store, os.R_OK, effective_ids=True),
        max(spool, 0),
        config.otlp.spool_mb * _MB,
        _free(_above(store)),
        problem,
    )


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _above(path: Path) -> Path:
    """Return the nearest folder at or above *path* that is there."""
    while not _is_dir(path) and path != path.parent:
        path = path.parent
    return path


def _owner(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mode & 0o777, path.group()
    except (OSError, KeyError):
        return 0, ""


def _has_group() -> bool:
    import grp

    try:
        return bool(grp.getgrnam(GROUP))
    except KeyError:
        return False


def _size(path: Path) -> int:
    """Return the bytes of an SQLite file and its log; -1 when there is none, or it may not be looked at."""
    sizes = []
    for name in (path.name, f"{path.name}-wal"):
        try:
            sizes.append(path.with_name(name).stat().st_size)
        except OSError:
            sizes.append(-1)
    return sizes[0] + max(sizes[1], 0) if sizes[0] >= 0 else -1


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def checks(f: PlaceFacts) -> list[Check]:
    """Judge them."""
    return [_folder(f), _store(f), _room(f), _group(f)]


def _folder(f: PlaceFacts) -> Check:
    it = Subject("place.state_dir", "state folder")
    if f.socket_problem:
        return it.failed(f.socket_problem, "the two processes have no socket", "name a shorter run.state_dir")
    if f.writable:
        return it.ok(f"{f.folder}, mode {f.mode:04o}")
    if not f.exists and f.makeable:
        return it.ok(f"{f.folder}, made at the start")
    # The agent has another user under systemd: what this process may not write, it may.
    if f.exists:
        return it.unknown(
            f"{f.folder} (mode {f.mode:04o}, group {f.group}) is not writable by this user",
            "run doctor as the agent's user (root, or whyspan)",
        )
    return it.failed(
        f"{f.folder} cannot be made by this user",
        "findings have nowhere to go",
        f"install -d -m 0750 {f.folder}, or name another run.state_dir",
    )


def _store(f: PlaceFacts) -> Check:
    it = Subject("place.store", "store")
    if f.store_bytes < 0:
        return it.note(f"{f.store}: none yet", "it is made when whyspan runs")
    size = f"{f.store}, {f.store_bytes / _MB:.1f} of at most {f.store_max_bytes / _MB:.0f} MB"
    if not f.store_readable:
        return it.note(
            f"{size}; not readable by this user", f"usermod -aG {GROUP} USER lets whyspan slow read it"
        )
    if f.store_bytes > f.store_max_bytes + f.store_max_bytes // 4:
        return it.limited(
            size,
            "the bound does not hold",
            "restart whyspan; if it stays so, move the file away and report it",
        )
    return it.ok(size)


def _room(f: PlaceFacts) -> Check:
    it = Subject("place.disk", "room on disk")
    left = f.store_max_bytes - max(f.store_bytes, 0) + f.spool_max_bytes - f.spool_bytes
    found = f"{f.free_bytes / _MB:.0f} MB free, at most {left / _MB:.0f} MB more wanted"
    if f.free_bytes >= left:
        return it.ok(found)
    return it.limited(
        found,
        "findings wait in memory while the disk is full, and are dropped beyond their bound",
        "free room, or lower store.max_mb and otlp.spool_mb",
    )


def _group(f: PlaceFacts) -> Check:
    it = Subject("place.group", "group whyspan")
    if f.has_group:
        return it.ok("there")
    return it.note("none: only the agent's user can read the store", f"groupadd --system {GROUP}")
