"""Finds the libraries and the executable of a process, whatever namespaces it lives in.

A path in /proc/PID/maps is the process's own view, and its file may be deleted or replaced. What is mapped is
therefore opened through /proc/PID/map_files, which leads to the very file, or else through /proc/PID/root, and
named by (device, inode). Whatever cannot be had is a state, not an exception.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from enum import StrEnum
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

_PROC = Path("/proc")
_MAX_MAPS_BYTES = 16 << 20  # 65,530 mappings are the kernel's default limit
_MAX_ELF_READ = 256 << 10  # headers and notes; a hostile file may claim any size for them
_DELETED = " (deleted)"
_MAX_BUILD_IDS = 1024

#: Build ids by device, inode, size and times of the file: to parse its headers takes a millisecond or two.
_build_ids: dict[tuple[int, int, int, int, int], str] = {}


class State(StrEnum):
    """What became of a look-up."""

    OK = ""
    GONE = "the process has ended"
    DENIED = "not permitted"
    MISSING = "its file cannot be reached"
    CHANGED = "another file has its path now"
    NO_FILE = "not a regular file"


class Mapped(NamedTuple):
    """A file that a process maps. ``path`` is as the process has it; undecodable bytes are surrogates."""

    path: str
    inode: int
    deleted: bool  # so says the kernel; a living file may also be called "… (deleted)"
    executable: bool  # some of it is mapped as code
    span: str  # its first mapping, as /proc/PID/map_files names it


class Maps(NamedTuple):
    """The files a process maps, each once, in order of address; none and a state when it cannot be read."""

    files: tuple[Mapped, ...]
    state: State


class Library(NamedTuple):
    """A file of a process, found again. ``open_path`` opens it as long as the process lives; empty unless OK.

    ``device`` and ``inode`` name the file: processes that share it give equal pairs. ``build_id`` is in hex
    digits, empty when the file has none.
    """

    tgid: int
    path: str
    device: int
    inode: int
    deleted: bool
    build_id: str
    open_path: str
    state: State

    @property
    def name(self) -> str:
        """The file's base name, for people; not cleaned."""
        return os.path.basename(self.path)


def mapped(tgid: int, proc: Path = _PROC) -> Maps:
    """Return the files that a process maps; of a huge list the first 16 MiB."""
    try:
        with (proc / str(tgid) / "maps").open("rb") as f:
            data = f.read(_MAX_MAPS_BYTES)
    except OSError as e:
        return Maps((), _state(e, tgid, proc))
    found: dict[tuple[bytes, bytes, bytes], Mapped] = {}
    for line in data.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/") or fields[4] == b"0":
            continue
        span, mode, _, device, inode, raw = fields
        executable = b"x" in mode
        known = found.get((raw, device, inode))
        if known is None:
            # The kernel escapes nothing but a line feed.
            path = os.fsdecode(raw.replace(b"\\012", b"\n"))
            deleted = path.endswith(_DELETED)
            found[raw, device, inode] = Mapped(
                path.removesuffix(_DELETED), int(inode), deleted, executable, span.decode()
            )
        elif executable and not known.executable:
            found[raw, device, inode] = known._replace(executable=True)
    return Maps(tuple(found.values()), State.OK)


def code_size(tgid: int, proc: Path = _PROC) -> str:
    """Return the size of what a process maps as code, as the kernel writes it; empty when it is gone.

    While it stays the same, so do the libraries.
    """
    try:
        text = (proc / str(tgid) / "status").read_bytes()
    except OSError:
        return ""
    return "".join(
        line.decode(errors="replace") for line in text.splitlines() if line.startswith((b"VmExe:", b"VmLib:"))
    )


def find(tgid: int, pattern: re.Pattern[str], proc: Path = _PROC, maps: Maps | None = None) -> list[Library]:
    """Return the mapped files whose path the pattern is found in, each file once."""
    maps = mapped(tgid, proc) if maps is None else maps
    found: dict[tuple[int, int] | str, Library] = {}
    for file in maps.files:
        if pattern.search(file.path):
            library = _look(tgid, file, proc)
            found.setdefault((library.device, library.inode) if library.inode else file.path, library)
    return list(found.values())


def executable(tgid: int, proc: Path = _PROC) -> Library:
    """Return the program that a process runs."""
    link = proc / str(tgid) / "exe"
    try:
        path, deleted = _name(os.readlink(link), tgid, proc)
    except OSError as e:
        return _failed(tgid, "", _state(e, tgid, proc))
    return _opened(tgid, path, str(link), proc)._replace(deleted=deleted)


def distinct(libraries: Iterable[Library]) -> dict[tuple[int, int], list[Library]]:
    """Group what was found by file: one group needs one attachment, however many processes share it.

    Containers whose overlays share a layer show its files under devices of their own: equal build ids tell them.
    """
    groups: dict[tuple[int, int], list[Library]] = {}
    for library in libraries:
        if library.state is State.OK:
            groups.setdefault((library.device, library.inode), []).append(library)
    return groups


def _look(tgid: int, file: Mapped, proc: Path) -> Library:
    """Open what is mapped: by its mapping, which needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE, or by its path."""
    literal = file.path + _DELETED * file.deleted
    path, deleted = _name(literal, tgid, proc)
    library = _opened(tgid, path, str(proc / str(tgid) / "map_files" / file.span), proc)
    state: State = library.state
    if state in (State.DENIED, State.MISSING):
        # A line feed may also be what the kernel writes for one, in a name that really has a backslash.
        for name in dict.fromkeys((literal, literal.replace("\n", "\\012"))):
            library = _opened(tgid, path, _inside(name, tgid, proc), proc)
            if library.state is not State.OK:
                state = state if state is State.CHANGED else library.state
            elif library.inode == file.inode:
                return library._replace(deleted=deleted)
            else:
                state = State.CHANGED
        return _failed(tgid, path, state)._replace(deleted=deleted)
    return library._replace(deleted=deleted)


def _inside(path: str, tgid: int, proc: Path) -> str:
    return f"{proc / str(tgid) / 'root'}{path}"


def _name(shown: str, tgid: int, proc: Path) -> tuple[str, bool]:
    """Return the path that the kernel shows, and whether it is deleted; a name may really end like that."""
    if shown.endswith(_DELETED) and not os.path.lexists(_inside(shown, tgid, proc)):
        return shown.removesuffix(_DELETED), True
    return shown, False


def _opened(tgid: int, path: str, open_path: str, proc: Path) -> Library:
    try:
        # Not blocking on a pipe, nor waking a device: whoever owns the path may have put either there.
        if not stat.S_ISREG(os.stat(open_path).st_mode):
            return _failed(tgid, path, State.NO_FILE)
        fd = os.open(open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as e:
        return _failed(tgid, path, _state(e, tgid, proc))
    with open(fd, "rb", buffering=0) as f:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return _failed(tgid, path, State.NO_FILE)
        return Library(
            tgid, path, info.st_dev, info.st_ino, False, _build_id_of(f, info), open_path, State.OK
        )


def _build_id_of(file: RawIOBase, info: os.stat_result) -> str:
    """Return the build id of an open file; of one that has not changed since it was read last, from memory."""
    key = info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
    known = _build_ids.get(key)
    if known is None:
        while len(_build_ids) >= _MAX_BUILD_IDS:
            del _build_ids[next(iter(_build_ids))]
        known = _build_ids[key] = build_id(file)
    return known


def _failed(tgid: int, path: str, state: State) -> Library:
    return Library(tgid, path, 0, 0, False, "", "", state)


def _state(error: OSError, tgid: int, proc: Path) -> State:
    if error.errno in (errno.EACCES, errno.EPERM):
        return State.DENIED
    return State.MISSING if (proc / str(tgid)).exists() else State.GONE


class Bounded:
    """A file of which no more than so many bytes are ever read, in all."""

    def __init__(self, file: IO[bytes] | RawIOBase, budget: int) -> None:
        self._file, self._left = file, budget
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes | None:
        if size < 0 or size > self._left:
            raise ValueError("more than headers and notes need")
        self._left -= max(size, 1)
        return self._file.read(size)


def build_id(file: IO[bytes] | RawIOBase) -> str:
    """Return the GNU build id of an open ELF file in hex digits; empty when it has none or is no ELF file."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.segments import NoteSegment

    try:
        bounded: Any = Bounded(file, _MAX_ELF_READ)
        for segment in ELFFile(bounded).iter_segments("PT_NOTE"):
            if isinstance(segment, NoteSegment):
                for note in segment.iter_notes():
                    if note["n_type"] == "NT_GNU_BUILD_ID":
                        return str(note["n_desc"])[:128]
    except Exception:  # hostile bytes raise whatever the parser did not think of
        pass
    return ""
