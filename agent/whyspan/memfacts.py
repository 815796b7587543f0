"""The memory of watched processes, of their memory cgroups (v1 and v2) and of the host, sampled every few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from whyspan import cgroups
from whyspan.cgroups import Mount
from whyspan.model import Fact, HostMemoryFact, MemoryCgroupFact, MemoryFact, MemoryUser
from whyspan.text import clean

EVERY_NS: Final = 4_000_000_000
#: Processes looked at per sample, in turn; cgroups; users of one that are looked at, and that are told.
MAX_PROCESSES, MAX_CGROUPS, MAX_LOOKED_AT, MAX_USERS = 32, 32, 256, 3
#: Cgroups looked at out of turn, per batch.
MAX_AT_ONCE: Final = 8
#: A cgroup this full (of 8) has its users looked at.
FULL_EIGHTHS: Final = 4
#: malloc's arenas: HEAP_MAX_SIZE of glibc on 64 bits. A process's maps are read again after so long, grown so much.
HEAP: Final = 64 << 20
HEAPS_AGAIN_NS: Final = 60_000_000_000
HEAPS_GROWTH: Final = 32 << 20
_MAX_MAPS: Final = 4 << 20  # bytes of /proc/PID/maps: 40,000 mappings
_NO_LIMIT: Final = 1 << 60  # v1 shows LONG_MAX rounded to a page
_MAX_NAME, _MAX_PATH = 64, 512


def _read(path: Path, limit: int = 65536) -> str:
    try:
        with open(path, "rb") as f:
            return f.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def _pairs(text: str) -> dict[str, int]:
    """``name number`` or ``name: number kB`` on each line; bytes."""
    out: dict[str, int] = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[1].isdigit():
            out[parts[0].rstrip(":")] = int(parts[1]) << (10 if parts[-1] == "kB" else 0)
    return out


def _number(path: Path) -> int:
    """A file's number; 0 where there is none, or no limit."""
    text = _read(path, 64).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else 0


def heaps_in(maps: str) -> tuple[int, int]:
    """Return how many 64 MiB reservations of malloc arenas a /proc/PID/maps shows, and the bytes committed of them.

    Such a heap begins at a multiple of its size; what is not used of it yet follows without any permission. Full ones
    that have no such rest are counted only where one follows them at once.
    """
    heaps = used = 0
    begin = end = 0  # of a writable mapping that may be heaps
    for line in maps.splitlines():
        fields = line.split(None, 5)
        lo_text, _, hi_text = fields[0].partition("-") if len(fields) >= 5 else ("", "", "")
        try:
            lo, hi = int(lo_text, 16), int(hi_text, 16)
        except ValueError:
            continue
        if begin and lo == end and fields[1].startswith("---p") and hi % HEAP == 0 and hi - lo < HEAP:
            heaps += (hi - begin) // HEAP
            used += end - begin
        begin = 0
        if lo % HEAP == 0 and fields[1] == "rw-p" and fields[4] == "0" and len(fields) == 5:
            begin, end = lo, hi
    return heaps, used


class Sampler:
    """Looks at memory every few seconds, at a bounded number of files. Not at a process's maps unless it has grown."""

    def __init__(self, proc: Path = Path("/proc"), mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._proc = proc
        self._mountinfo = mountinfo
        self._due_ns = 0
        self._turn = 0
        self._last: dict[int, MemoryFact] = {}  # with the last look at its heaps
        self._looked: dict[int, int] = {}  # anonymous bytes at that look
        self._host: HostMemoryFact | None = None
        self._again_ns: dict[int, int] = {}  # by a cgroup's id, when it may be looked at out of turn again

    def facts(self, tgids: Iterable[int], now_ns: int = 0) -> list[Fact]:
        """Return what there is to say of these processes now, if it is time."""
        now_ns = now_ns or time.monotonic_ns()
        if now_ns < self._due_ns:
            return []
        self._due_ns = now_ns + EVERY_NS
        watched = sorted(tgids)
        for gone in self._last.keys() - set(watched):
            del self._last[gone]
            self._looked.pop(gone, None)
        start = self._turn % len(watched) if len(watched) > MAX_PROCESSES else 0
        self._turn = start + MAX_PROCESSES
        chosen = (watched[start:] + watched[:start])[:MAX_PROCESSES]
        samples = [fact for tgid in chosen if (fact := self._process(tgid, now_ns))]
        samples = self._with_heaps(samples, now_ns)
        self._last.update((fact.tgid, fact) for fact in samples)
        out: list[Fact] = list(samples)
        mounts = cgroups.memory_mounts(cgroups.mounts(self._mountinfo))
        paths = {p for fact in samples for p in cgroups.ancestors(fact.cgroup)}
        for path in sorted(paths, key=lambda p: (-len(p), p))[:MAX_CGROUPS]:
            group = self._cgroup(path, mounts, now_ns)
            if group is not None:
                out.append(group)
        out.append(self._host_fact(now_ns))
        return out

    def groups(self, ids: Iterable[int], now_ns: int = 0) -> list[Fact]:
        """Look at once at memory cgroups that were full, by their ids; at each every few seconds at most."""
        now_ns = now_ns or time.monotonic_ns()
        due = [i for i in ids if i and now_ns >= self._again_ns.get(i, 0)][:MAX_AT_ONCE]
        if not due:
            return []
        self._again_ns = {i: t for i, t in self._again_ns.items() if t > now_ns}
        self._again_ns.update((i, now_ns + EVERY_NS) for i in due)
        mounts = cgroups.memory_mounts(cgroups.mounts(self._mountinfo))
        version = mounts[0].version if mounts else 2
        paths = (cgroups.path_of_id(i, mounts, version) for i in due)
        found = (self._cgroup(path, mounts, now_ns) for path in paths if path)
        return [fact for fact in found if fact is not None]

    def _process(self, tgid: int, now_ns: int) -> MemoryFact | None:
        folder = self._proc / str(tgid)
        status = _pairs(_read(folder / "status"))
        if "RssAnon" not in status:
            return None  # gone, or a kernel thread
        last = self._last.get(tgid)
        return MemoryFact(
            tgid=tgid,
            ts_ns=now_ns,
            cgroup=clean(cgroups.memory_path_in(_read(folder / "cgroup")), _MAX_PATH),
            anon_bytes=status["RssAnon"],
            file_bytes=status.get("RssFile", 0),
            shmem_bytes=status.get("RssShmem", 0),
            swap_bytes=status.get("VmSwap", 0),
            heaps=last.heaps if last else 0,
            heap_bytes=last.heap_bytes if last else 0,
            heaps_ns=last.heaps_ns if last else 0,
        )

    def _with_heaps(self, samples: list[MemoryFact], now_ns: int) -> list[MemoryFact]:
        """Look at the maps of one process: the one that grew most since, if any did."""
        grown = [
            (fact.anon_bytes - self._looked.get(fact.tgid, 0), fact.tgid)
            for fact in samples
            if not fact.heaps_ns or now_ns - fact.heaps_ns >= HEAPS_AGAIN_NS
        ]
        growth, tgid = max(grown, default=(0, 0))
        if growth < HEAPS_GROWTH:
            return samples
        heaps, used = heaps_in(_read(self._proc / str(tgid) / "maps", _MAX_MAPS))
        at = next(i for i, fact in enumerate(samples) if fact.tgid == tgid)
        self._looked[tgid] = samples[at].anon_bytes
        samples[at] = replace(samples[at], heaps=heaps, heap_bytes=used, heaps_ns=now_ns)
        return samples

    def _cgroup(self, path: str, mounts: list[Mount], now_ns: int) -> MemoryCgroupFact | None:
        for mount in mounts:
            folder = cgroups.folder(path, mount)
            if folder is None:
                continue
            fact = (_version1 if mount.version == 1 else _version2)(clean(path, _MAX_PATH), folder, now_ns)
            if fact is None:
                continue
            limit = min(b for b in (fact.limit_bytes, fact.high_bytes) if b)
            if fact.usage_bytes * 8 >= limit * FULL_EIGHTHS:
                fact = replace(fact, users=self._users(_members(folder)))
            return fact
        return None

    def _users(self, tgids: Iterable[int]) -> list[MemoryUser]:
        found: list[tuple[int, int]] = []
        for n, tgid in enumerate(tgids):
            if n >= MAX_LOOKED_AT:
                break
            statm = _read(self._proc / str(tgid) / "statm", 256).split()
            if len(statm) > 2:  # resident less shared: what only it has
                found.append(((int(statm[1]) - int(statm[2])) * os.sysconf("SC_PAGE_SIZE"), tgid))
        best = sorted(found, reverse=True)[:MAX_USERS]
        return [
            MemoryUser(tgid, clean(_read(self._proc / str(tgid) / "comm", 64).strip(), _MAX_NAME), rss)
            for rss, tgid in best
            if rss > 0
        ]

    def _host_fact(self, now_ns: int) -> HostMemoryFact:
        info, counters = _pairs(_read(self._proc / "meminfo")), _pairs(_read(self._proc / "vmstat"))
        last = self._host
        stalls = sum(n for name, n in counters.items() if name.startswith("allocstall"))
        users = last.users if last else []
        if last is not None and stalls > last.stalls:
            users = self._users(int(name) for name in os.listdir(self._proc) if name.isdigit())
        self._host = HostMemoryFact(
            ts_ns=now_ns,
            total_bytes=info.get("MemTotal", 0),
            free_bytes=info.get("MemFree", 0),
            available_bytes=info.get("MemAvailable", 0),
            cached_bytes=info.get("Cached", 0),
            stalls=stalls,
            compact_stalls=counters.get("compact_stall", 0),
            oom_kills=counters.get("oom_kill", 0),
            users=users,
        )
        return self._host


def _version1(path: str, folder: Path, now_ns: int) -> MemoryCgroupFact | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if not limit:
        return None
    stat = _pairs(_read(folder / "memory.stat"))
    return MemoryCgroupFact(
        path=path,
        cgroup_id=_id(folder),
        ts_ns=now_ns,
        limit_bytes=limit,
        usage_bytes=_number(folder / "memory.usage_in_bytes"),
        anon_bytes=stat.get("total_rss", stat.get("rss", 0)),
        file_bytes=stat.get("total_cache", stat.get("cache", 0)),
        swap_bytes=stat.get("total_swap", stat.get("swap", 0)),
        hits=_number(folder / "memory.failcnt"),
        oom_kills=_pairs(_read(folder / "memory.oom_control")).get("oom_kill", 0),
    )


def _version2(path: str, folder: Path, now_ns: int) -> MemoryCgroupFact | None:
    limit, high = _number(folder / "memory.max"), _number(folder / "memory.high")
    if not limit and not high:
        return None
    stat, events = _pairs(_read(folder / "memory.stat")), _pairs(_read(folder / "memory.events"))
    return MemoryCgroupFact(
        path=path,
        cgroup_id=_id(folder),
        ts_ns=now_ns,
        limit_bytes=limit,
        high_bytes=high,
        usage_bytes=_number(folder / "memory.current"),
        anon_bytes=stat.get("anon", 0),
        file_bytes=stat.get("file", 0),
        swap_bytes=_number(folder / "memory.swap.current"),
        hits=events.get("max", 0),
        high_hits=events.get("high", 0),
        oom_kills=events.get("oom_kill", 0),
    )


def _id(folder: Path) -> int:
    """The kernel's id of a cgroup: on 64 bits its inode number."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return 0


def _members(folder: Path, levels: int = 3) -> Iterator[int]:
    for line in _read(folder / "cgroup.procs").splitlines():
        if line.isdigit():
            yield int(line)
    if levels:
        try:
            children = sorted(p for p in folder.iterdir() if p.is_dir())[:MAX_CGROUPS]
        except OSError:
            return
        for child in children:
            yield from _members(child, levels - 1)
