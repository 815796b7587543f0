"""Facts of storage, looked up when records name a file or a disk by number: once each, bounded, never on the file
system itself, which may hang.
"""

from __future__ import annotations

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from whyspan_probes.schema import Events, Schema

from whyspan.disknames import disk_facts, swap_fact
from whyspan.model import Fact, MappedFact, SwapFact, WriterFact
from whyspan.text import clean

_MAX_NAME, _MAX_PATH = 64, 512
_MAX_KNOWN: Final = 4096
_MAX_PROCESSES: Final = 2  # whose mappings are read per batch
_MAX_MAPPINGS: Final = 65_536  # vm.max_map_count is 65,530 unless changed
_MAX_READING_S: Final = 0.05
_LOOK_EVERY: Final = 256  # lines between looks at the clock
_MAX_DISKS: Final = 16
_AGAIN_S: Final = 60.0  # a number may have become another disk's
_SWAP_EVERY_S: Final = 5.0
_WRITERS_EVERY_S: Final = 2.0
_MAX_WRITERS: Final = 4
_MAX_SCANNED_FDS: Final = 20_000
_FAULT, _SWAP = 3, 8  # aux of page_wait
_FILE = 1  # aux of fd_block
_FSYNC: Final = (74, 75, 162, 277, 306)
_NAME_BYTES: Final = 15  # of a file's name in file_flush


class DiskFacts:
    """Looks up what the records of ``faults`` and ``block_io`` speak of."""

    def __init__(self, schema: Schema, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._schema = schema
        self._proc, self._sys = proc, sys
        self._known: OrderedDict[tuple[int, int, int], None] = OrderedDict()
        self._disks: dict[int, float] = {}  # when it was looked up
        self._swap = SwapFact()
        self._next_swap_s = self._next_writers_s = 0.0
        self._flushed: Counter[tuple[int, int, bytes]] = Counter()

    def facts(self, events: Events, now_s: float) -> list[Fact]:
        """Return what is new in a batch."""
        waits = self._schema.select(events, "page_wait")
        flushes = self._schema.select(events, "file_flush")
        return [
            *self._mapped(waits),
            *self._swaps(waits, now_s),
            *self._names(events, waits, flushes, now_s),
            *self._writers(events, flushes, now_s),
        ]

    def _mapped(self, waits: Events) -> list[Fact]:
        wanted: dict[int, set[tuple[int, int]]] = {}
        if not len(waits):
            return []
        for tgid, inode, dev in np.unique(
            waits[(waits["aux"] & _FAULT) != 0][["tgid", "inode", "dev"]]
        ).tolist():
            if (tgid, inode, dev) in self._known or (tgid not in wanted and len(wanted) >= _MAX_PROCESSES):
                continue
            self._known[tgid, inode, dev] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            wanted.setdefault(tgid, set()).add((inode, dev))
        return [f for tgid, files in wanted.items() for f in mapped_facts(tgid, files, self._proc)]

    def _swaps(self, waits: Events, now_s: float) -> list[Fact]:
        if now_s < self._next_swap_s or not (waits["aux"] & _SWAP).any():
            return []
        self._next_swap_s = now_s + _SWAP_EVERY_S
        found = swap_fact(self._proc)
        if found == self._swap:
            return []
        self._swap = found
        return [found]

    def _names(self, events: Events, waits: Events, flushes: Events, now_s: float) -> list[Fact]:
        blocks = self._schema.select(events, "fd_block")
        files = blocks[blocks["aux"] == _FILE]
        rows = (waits, flushes, self._schema.select(events, "block_done"), files)
        devs = {int(d) for r in rows if len(r) for d in np.unique(r["dev"]).tolist()} - {0}
        due = [d for d in sorted(devs) if now_s >= self._disks.get(d, 0.0)][:_MAX_DISKS]
        if not due:
            return []
        for dev in due:
            self._disks[dev] = now_s + _AGAIN_S
        if len(self._disks) > _MAX_KNOWN:
            self._disks = {d: self._disks[d] for d in due}
        return list(disk_facts(due, self._proc, self._sys))

    def _writers(self, events: Events, flushes: Events, now_s: float) -> list[Fact]:
        """Look for who writes the files written back most, once a watched thread has waited for a disk beside it."""
        if len(flushes):
            for dev, inode, name, pages in flushes[["dev", "inode", "file", "pages"]].tolist():
                self._flushed[dev, inode, name] += max(pages, 1)
        if not self._flushed or now_s < self._next_writers_s:
            return []
        blocks = self._schema.select(events, "fd_block")
        if not len(blocks) or not np.isin(blocks["syscall_nr"], _FSYNC).any():
            self._flushed = Counter(dict(self._flushed.most_common(_MAX_WRITERS)))
            return []
        self._next_writers_s = now_s + _WRITERS_EVERY_S
        wanted, self._flushed = dict(self._flushed.most_common(_MAX_WRITERS)), Counter()
        return list(writer_facts(wanted, self._proc))


def mapped_facts(tgid: int, files: Iterable[tuple[int, int]], proc: Path = Path("/proc")) -> list[Fact]:
    """Return the paths of mapped files, given as (inode, device); of those that are found in 50 ms.

    An overlay's mappings have a device of its own: there the inode number alone must do.
    """
    left = set(files)
    devs: dict[int, list[int]] = {}
    for inode, dev in left:
        devs.setdefault(inode, []).append(dev)
    out: list[Fact] = []
    until_s = time.monotonic() + _MAX_READING_S
    try:
        with (proc / str(tgid) / "maps").open("rb") as lines:
            for i, line in enumerate(islice(lines, _MAX_MAPPINGS)):
                if not left or (i % _LOOK_EVERY == _LOOK_EVERY - 1 and time.monotonic() > until_s):
                    break
                fields = line.split(maxsplit=5)
                if len(fields) < 6 or fields[4] == b"0":
                    continue
                inode = int(fields[4])
                if inode not in devs:
                    continue
                major, _, minor = fields[3].partition(b":")
                dev = int(major, 16) << 20 | int(minor, 16)
                if dev not in devs[inode] and int(major, 16) == 0 and len(devs[inode]) == 1:
                    dev = devs[inode][0]
                if (inode, dev) not in left:
                    continue
                left.remove((inode, dev))
                path = _unescaped(fields[5].rstrip(b"\n")).decode(errors="replace")
                out.append(MappedFact(tgid, inode, dev, clean(path, _MAX_PATH)))
    except (OSError, ValueError):
        pass
    return out


def _unescaped(path: bytes) -> bytes:
    return path.replace(b"\\012", b"\n")  # the only character that /proc/PID/maps escapes


def writer_facts(
    wanted: Iterable[tuple[int, int, bytes]], proc: Path = Path("/proc"), limit: int = _MAX_SCANNED_FDS
) -> list[Fact]:
    """Return who has files, given as (device, inode, name as in ``file_flush``), open for writing.

    Looks at no more than 20,000 descriptors of the host. Links and fdinfo are the kernel's own: no file system is
    asked.
    """
    left = {(raw.split(b"\0", 1)[0], inode): dev for dev, inode, raw in wanted}
    names = {name for name, _ in left}
    out: list[Fact] = []
    looked = 0
    for pid in os.listdir(proc):
        folder = proc / pid / "fd"
        try:
            fds = os.listdir(folder) if pid.isdigit() and left else []
        except OSError:
            continue
        for fd in fds:
            looked += 1
            if looked > limit:
                return out
            try:
                target = os.readlink(os.fsencode(folder / fd))
                base = target.removesuffix(b" (deleted)").rsplit(b"/", 1)[-1][:_NAME_BYTES]
                if base not in names or not os.lstat(folder / fd).st_mode & 0o200:
                    continue
                info = (proc / pid / "fdinfo" / fd).read_text()
                comm = (proc / pid / "comm").read_text(errors="replace").strip()
            except OSError:
                continue
            inode = next(
                (int(v) for k, _, v in (x.partition(":") for x in info.splitlines()) if k == "ino"), 0
            )
            dev = left.pop((base, inode), None)
            if dev is not None:
                path = clean(target.decode(errors="replace"), _MAX_PATH)
                out.append(WriterFact(dev, inode, int(pid), clean(comm, _MAX_NAME), path))
    return out
