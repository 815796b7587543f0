"""Names of code that a process made while it ran, from the map that it writes of it: /tmp/perf-PID.map."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from typing import IO, Final

from whyspan.code import theirs

MAX_BYTES: Final = 16 << 20
_MAX_LINE: Final = 1024
_MAX_JIT: Final = 256 << 20  # no function is longer


def of_process(tgid: int, addresses: list[int]) -> list[tuple[int, int, str]]:
    """Return the ranges that a process's own map of the code it made has for addresses. Raises OSError."""
    with open(f"/proc/{tgid}/status", "rb") as f:
        status = dict(line.split(b":", 1) for line in f.read(65536).splitlines() if b":" in line)
    own, user = int(status[b"NSpid"].split()[-1]), int(status[b"Uid"].split()[1])
    root = theirs.root_of(tgid)
    try:
        fd = theirs.within(root, f"tmp/perf-{own}.map")
    finally:
        os.close(root)
    with open(fd, "rb") as f:
        s = os.fstat(fd)
        if s.st_uid != user:
            raise OSError("its perf map is somebody else's")
        if s.st_mtime < _started(tgid) - 2:
            raise OSError("its perf map is of an earlier process")
        # What was written last holds, since memory is used again.
        f.seek(max(0, s.st_size - MAX_BYTES))
        return in_map(f, addresses)


def _started(tgid: int) -> float:
    """Return the wall time of a process's start, in s."""
    with open(f"/proc/{tgid}/stat", "rb") as f:
        ticks = int(f.read(4096).rpartition(b")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def in_map(file: IO[bytes], addresses: list[int]) -> list[tuple[int, int, str]]:
    """Look addresses up in lines of ``start size name``, in hex; the last that holds one is right."""
    wanted = sorted(set(addresses))
    found: dict[int, tuple[int, int, str]] = {}
    left = MAX_BYTES
    whole = True
    while left > 0 and (line := file.readline(_MAX_LINE)):
        left -= len(line)
        begins, whole = whole, line.endswith(b"\n")
        fields = line.split(None, 2) if begins else ()
        if len(fields) < 3:
            continue
        try:
            start, size = int(fields[0], 16), int(fields[1], 16)
        except ValueError:
            continue
        if not 0 < size <= _MAX_JIT or not 0 < start < 1 << 63:
            continue
        name = ""
        for i in range(bisect_left(wanted, start), bisect_left(wanted, start + size)):
            name = name or fields[2].strip().decode("utf-8", "replace")
            found[wanted[i]] = (start, start + size, name)
    return list(dict.fromkeys(found.values()))
