"""Follows which files of interest the watched processes map, cheaply: a process is read again only when its code grew.

A library may come any time after the start, so a process is looked at when it is first seen, soon and less and less
often after that, and then at every scan; soon again when it was found to have mapped code, for one that is still
loading may be about to map what matters. A look reads one line of /proc/PID/status (20 us); only when the size of
mapped code has changed is the list of mappings read (1 ms for a Python server with torch).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from whyspan_probes import libraries
from whyspan_probes.libraries import Library, State

_PROC = Path("/proc")
_FIRST_S, _LONGEST_S = 0.25, 5.0  # the second is discovery's own pace
_WHOLE_EVERY_S = 60.0  # even a size that is the same may be of other files
_MAX_LOOKS = 64
_HASHED_BYTES = 64 << 10

#: What tells a file from others, also when containers show it under devices of their own.
Key = tuple[str | int, ...]


@dataclass
class MappedFile:
    """A file that watched processes map. ``processes`` has a path for each by which it can be opened.

    ``problem`` says why it cannot be had; then it has no path.
    """

    path: str
    build_id: str = ""
    problem: str = ""
    processes: dict[int, str] = field(default_factory=dict)


@dataclass
class _Seen:
    delay_s: float
    next_s: float
    whole_s: float
    code: str = ""
    files: list[tuple[Key, Library]] = field(default_factory=list)


def key_of(library: Library) -> Key:
    """Name the file.

    Two containers whose overlays share a layer show its files under devices of their own, but with the inode number
    of the one file below, to which the kernel attaches: two links would report everything twice. A file that a
    container has *changed* keeps its inode number, not its content or time. (Changed in mode or owner only, it does
    keep them, and is taken for the other: then its processes are not hooked.)
    """
    if library.state is not State.OK:
        return ("", library.path, library.state.value)
    info = os.stat(library.open_path)
    content = library.build_id
    if not content:
        with open(library.open_path, "rb") as f:
            content = hashlib.sha256(f.read(_HASHED_BYTES)).hexdigest()
    return (content, info.st_ino, info.st_size, info.st_mtime_ns)


class MappedFiles:
    """``files`` is what the processes followed map now, of the paths that one of the patterns is found in."""

    def __init__(self, patterns: Iterable[str], proc: Path = _PROC) -> None:
        self._pattern = re.compile("|".join(f"(?:{p})" for p in dict.fromkeys(patterns)) or r"(?!)")
        self._proc = proc
        self._seen: dict[int, _Seen] = {}
        self.files: dict[Key, MappedFile] = {}

    def again(self, tgid: int) -> None:
        """Look at the process at the next call, whatever its size: it executes another program."""
        if tgid in self._seen:
            self._seen[tgid] = _Seen(_FIRST_S, 0.0, 0.0, files=self._seen[tgid].files)

    def follow(self, tgids: Collection[int], now_s: float) -> bool:
        """Look at those processes that are due, forget all others; return whether anything has changed.

        *now_s* is CLOCK_MONOTONIC.
        """
        changed = False
        for tgid in self._seen.keys() - set(tgids):
            changed |= bool(self._seen.pop(tgid).files)
        looks = 0
        for tgid in tgids:
            seen = self._seen.get(tgid)
            if seen is None:
                seen = self._seen[tgid] = _Seen(_FIRST_S, now_s, now_s)
            if now_s < seen.next_s:
                continue
            if looks == _MAX_LOOKS:
                break  # the others are still due the next time
            looks += 1
            code = seen.code
            changed |= self._look(tgid, seen, now_s)
            if seen.code != code:
                seen.delay_s = _FIRST_S
            seen.next_s = now_s + seen.delay_s
            seen.delay_s = min(seen.delay_s * 2, _LONGEST_S)
        if changed:
            self._group()
        return changed

    def _look(self, tgid: int, seen: _Seen, now_s: float) -> bool:
        code = libraries.code_size(tgid, self._proc)
        if code == seen.code and now_s < seen.whole_s:
            return False
        seen.code, seen.whole_s = code, now_s + _WHOLE_EVERY_S
        before = [key for key, _ in seen.files]
        seen.files = []
        for library in libraries.find(tgid, self._pattern, self._proc):
            try:
                seen.files.append((key_of(library), library))
            except OSError:  # it has just ended, or been replaced
                seen.code = ""
        return before != [key for key, _ in seen.files]

    def _group(self) -> None:
        self.files = {}
        for tgid, seen in self._seen.items():
            for key, library in seen.files:
                problem = library.state.value
                file = self.files.setdefault(key, MappedFile(library.path, library.build_id, problem))
                file.processes[tgid] = library.open_path
