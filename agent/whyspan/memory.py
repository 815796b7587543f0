"""What is known of memory: processes over minutes, cgroups with a limit, the host, and whom the OOM killer chose."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any, Final, NamedTuple

from whyspan_probes.schema import Events, Schema

from whyspan.lru import Lru
from whyspan.model import HostMemoryFact, MemoryCgroupFact, MemoryFact
from whyspan.text import clean

#: Samples of a process that are kept, and how far apart they are: half an hour of growth.
HISTORY: Final = 60
APART_NS: Final = 30_000_000_000
#: The OOM killer's mark and the end of the process are this close.
DYING_NS: Final = 30_000_000_000
# Records count in pages; a recording is replayed on a machine with pages of the same size.
_PAGE: Final = mmap.PAGESIZE


class Victim(NamedTuple):
    """A process that the OOM killer chose. Sizes in bytes; ``cgroup_id`` 0: the host's memory was full.

    ``tgid`` is 0 where the kernel tells only the thread; ``asker_tgid`` is whoever got no memory, 0 not known.
    """

    ts_ns: int
    tid: int
    tgid: int
    name: str
    cgroup_id: int
    limit_bytes: int
    usage_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    asker_tgid: int

    @property
    def rss_bytes(self) -> int:
        """All of its memory that was resident."""
        return self.anon_bytes + self.file_bytes + self.shmem_bytes


class Memory:
    """Memory as of the last batch fed; bounded. Part of ``Facts``."""

    def __init__(self, processes: int = 1024, cgroups: int = 256, victims: int = 64) -> None:
        self._processes: Lru[int, deque[MemoryFact]] = Lru(processes)
        self._cgroups: Lru[int, MemoryCgroupFact] = Lru(cgroups)
        self._victims: deque[Victim] = deque(maxlen=victims)
        self.host: HostMemoryFact | None = None

    def put(self, fact: MemoryFact | MemoryCgroupFact | HostMemoryFact) -> None:
        """Take in a fact; later ones replace earlier ones."""
        if isinstance(fact, MemoryFact):
            samples = self._processes.get(fact.tgid)
            if samples is None:
                samples = deque(maxlen=HISTORY)
                self._processes.put(fact.tgid, samples)
            # The last sample is always the newest; those before it are a while apart.
            if len(samples) > 1 and samples[-1].ts_ns - samples[-2].ts_ns < APART_NS:
                samples.pop()
            samples.append(fact)
        elif isinstance(fact, MemoryCgroupFact):
            self._cgroups.put(fact.cgroup_id, fact)
        else:
            self.host = fact

    def see(self, events: Events, schema: Schema) -> None:
        """Take in a batch's OOM kills."""
        rows = schema.select(events, "oom_victim")
        if not len(rows):
            return
        names = {
            (r["ts_ns"], r["tid"]): (clean(_text(r["comm"])), r["asker_tgid"])
            for r in _dicts(schema.select(events, "oom_name"))
        }
        for r in _dicts(rows):
            name, asker = names.get((r["ts_ns"], r["tid"]), ("", 0))
            self._victims.append(
                Victim(
                    ts_ns=r["ts_ns"],
                    tid=r["tid"],
                    tgid=r["tgid"],
                    name=name,
                    cgroup_id=r["cgroup_id"],
                    limit_bytes=r["limit_pages"] * _PAGE,
                    usage_bytes=r["usage_pages"] * _PAGE,
                    anon_bytes=r["anon_pages"] * _PAGE,
                    file_bytes=r["file_pages"] * _PAGE,
                    shmem_bytes=r["shmem_pages"] * _PAGE,
                    asker_tgid=asker,
                )
            )

    def process(self, tgid: int) -> MemoryFact | None:
        """Return the last sample of a process."""
        samples = self._processes.get(tgid)
        return samples[-1] if samples else None

    def history(self, tgid: int) -> list[MemoryFact]:
        """Return samples of a process over the last half hour, oldest first."""
        return list(self._processes.get(tgid) or ())

    def cgroup(self, cgroup_id: int) -> MemoryCgroupFact | None:
        """Return a memory cgroup by its kernel id; None where it has no limit, or was never looked at."""
        return self._cgroups.get(cgroup_id) if cgroup_id else None

    def limits(self, tgid: int) -> list[MemoryCgroupFact]:
        """Return the limited memory cgroups that a process is in, the innermost first."""
        fact = self.process(tgid)
        if fact is None or not fact.cgroup:
            return []
        found = [
            g for g in self._cgroups.values() if fact.cgroup == g.path or fact.cgroup.startswith(f"{g.path}/")
        ]
        return sorted(found, key=lambda g: -len(g.path))

    def victims(self, since_ns: int, until_ns: int) -> list[Victim]:
        """Return those the OOM killer chose in [since, until], oldest first."""
        return [v for v in self._victims if since_ns <= v.ts_ns <= until_ns]

    def killed(self, tgid: int, died_ns: int) -> Victim | None:
        """Return the OOM kill of which a process died at *died_ns*, or None."""
        for v in reversed(self._victims):
            if v.ts_ns <= died_ns <= v.ts_ns + DYING_NS and tgid in (v.tgid or v.tid, v.tgid):
                return v
        return None


def _dicts(rows: Any) -> list[dict[str, Any]]:
    names = rows.dtype.names or ()
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")
