"""What a process maps as code: which file lies at an address, and where in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
#: Of a longer list (65,530 mappings are the kernel's default limit) the first part: the program and what it loads first
#: lie behind what it maps later, but no server that was looked at came to a quarter of this.
_MAX_BYTES: Final = 4 << 20
_MAX_CODE: Final = 8192
_DELETED: Final = " (deleted)"
#: Files that hold code made while the program ran: they have an inode and no symbols.
_MADE: Final = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/")


class Mapping(NamedTuple):
    """A piece of code in memory. ``path`` is as the process has it; ``inode`` 0: of no file."""

    start: int
    end: int
    offset: int
    path: str
    inode: int = 0

    @property
    def of_file(self) -> bool:
        """Whether it is a file's; else it was made while the program ran, or is the kernel's."""
        return bool(self.inode) and not self.path.startswith(_MADE)

    @property
    def span(self) -> str:
        """Its name in /proc/PID/map_files."""
        return f"{self.start:x}-{self.end:x}"

    @property
    def name(self) -> str:
        """The file's base name, for people; not cleaned."""
        if self.of_file or self.path.startswith("["):
            return self.path.removesuffix(_DELETED).rpartition("/")[2]
        return "(anonymous)"


class Maps:
    """The code that a process maps."""

    def __init__(self, mappings: Iterable[Mapping] = ()) -> None:
        self.all = sorted(mappings)
        self._starts = [m.start for m in self.all]

    def at(self, address: int) -> Mapping | None:
        """Return what holds the address; None when that is no code."""
        i = bisect_right(self._starts, address) - 1
        return self.all[i] if i >= 0 and address < self.all[i].end else None


def parse(data: bytes) -> Maps:
    """Return the executable mappings of a list as /proc/PID/maps has it; lines that are none are left out."""
    found: list[Mapping] = []
    for line in data.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 5 or b"x" not in fields[1]:
            continue
        start, _, end = fields[0].partition(b"-")
        # The kernel escapes nothing in a path but a line feed.
        path = fields[5].replace(b"\\012", b"\n").decode(errors="surrogateescape") if len(fields) > 5 else ""
        try:
            found.append(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), path, int(fields[4])))
        except ValueError:
            continue
        if len(found) == _MAX_CODE:
            break
    return Maps(found)


def read(tgid: int, proc: Path = _PROC) -> Maps | None:
    """Return the code that a process maps; None when it has ended. Half a millisecond, and 3 us per mapping."""
    try:
        with (proc / str(tgid) / "maps").open("rb") as f:
            data = f.read(_MAX_BYTES)
    except OSError:
        return None
    # A zombie has an empty list.
    return parse(data) if data else None
