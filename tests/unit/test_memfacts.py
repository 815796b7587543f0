"""Memory as /proc and both versions of the cgroup file systems show it, out of folders of our own; and its history."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from whyspan import cgroups, memfacts
from whyspan.facts import Facts
from whyspan.memfacts import EVERY_NS, HEAP, HEAPS_AGAIN_NS, MAX_PROCESSES, Sampler, heaps_in
from whyspan.memory import DYING_NS, HISTORY, Memory
from whyspan.model import Batch, HostMemoryFact, MemoryCgroupFact, MemoryFact, MemoryUser
from whyspan_probes.schema import EVENT

from tests.unit.timeline import SCHEMA, EventBuilder, ns

T = TypeVar("T")
MIB = 1 << 20
PAGE = 4096
SECOND = 10**9
#: As the kernel shows that there is no limit.
NO_LIMIT = {1: "9223372036854771712\n", 2: "max\n"}


class Host:
    """A /proc and a cgroup file system in a folder."""

    def __init__(self, root: Path, version: int) -> None:
        self.version = version
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.proc.mkdir()
        self.cgroup.mkdir()
        kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup rw"
        self.mountinfo = root / "mountinfo"
        self.mountinfo.write_text(f"30 23 0:26 / {self.cgroup} rw - {kind}\n")
        self.counters(0)
        (self.proc / "meminfo").write_text(
            "MemTotal: 24000 kB\nMemFree: 90 kB\nMemAvailable: 20000 kB\nCached: 19000 kB\n"
        )

    def counters(self, stalls: int) -> None:
        """Set the host's direct reclaims."""
        (self.proc / "vmstat").write_text(
            f"allocstall_normal {stalls}\nallocstall_movable 2\ncompact_stall 3\noom_kill 4\n"
        )

    def process(self, tgid: int, group: str, anon_kib: int, comm: str = "server", maps: str = "") -> None:
        """Have a process, and put it into its group."""
        folder = self.proc / str(tgid)
        folder.mkdir(exist_ok=True)
        line = f"4:memory:{group}\n1:cpu:/elsewhere\n0::/\n" if self.version == 1 else f"0::{group}\n"
        (folder / "cgroup").write_text(line)
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "statm").write_text(f"99999 {anon_kib // 4 + 10} 10 1 0 5 0\n")
        (folder / "status").write_text(
            f"Name:\t{comm}\nVmSwap:\t      12 kB\nRssAnon:\t {anon_kib} kB\nRssFile:\t 8 kB\nRssShmem:\t 4 kB\n"
        )
        (folder / "maps").write_text(maps)

    def group(self, path: str, limit: int, usage: int, pids: str = "") -> None:
        """Have a group."""
        folder = self.cgroup / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        files = (
            {
                "memory.limit_in_bytes": f"{limit}\n" if limit else NO_LIMIT[1],
                "memory.usage_in_bytes": f"{usage}\n",
                "memory.failcnt": "41\n",
                "memory.stat": "cache 1\nrss 2\ntotal_cache 300\ntotal_rss 200\ntotal_swap 100\n",
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            }
            if self.version == 1
            else {
                "memory.max": f"{limit}\n" if limit else NO_LIMIT[2],
                "memory.high": "max\n",
                "memory.current": f"{usage}\n",
                "memory.swap.current": "100\n",
                "memory.stat": "anon 200\nfile 300\nkernel 5\n",
                "memory.events": "low 0\nhigh 5\nmax 41\noom 8\noom_kill 7\n",
            }
        )
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "cgroup.procs").write_text(pids)

    def sampler(self) -> Sampler:
        return Sampler(self.proc, self.mountinfo)


@pytest.fixture(params=[1, 2])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path, request.param)


def of(facts: Sequence[object], kind: type[T]) -> list[T]:
    return [f for f in facts if isinstance(f, kind)]


def test_a_process_and_the_limited_groups_it_is_in(host: Host) -> None:
    host.process(100, "/pods/web/c1", 4096)
    host.process(101, "/pods/web/c2", 8192, comm="shipper")
    host.group("/pods", 0, 999 * MIB)
    host.group("/pods/web", 12 * MIB, 10 * MIB)
    host.group("/pods/web/c1", 0, MIB, "100\n")
    host.group("/pods/web/c2", 0, MIB, "101\n")
    facts = host.sampler().facts([100], 5 * SECOND)
    process, group, whole = facts
    assert process == MemoryFact(
        tgid=100,
        ts_ns=5 * SECOND,
        cgroup="/pods/web/c1",
        anon_bytes=4 * MIB,
        file_bytes=8192,
        shmem_bytes=4096,
        swap_bytes=12288,
    )
    assert isinstance(group, MemoryCgroupFact)
    assert group.cgroup_id == (host.cgroup / "pods/web").stat().st_ino
    assert (group.path, group.limit_bytes, group.usage_bytes) == ("/pods/web", 12 * MIB, 10 * MIB)
    assert (group.anon_bytes, group.file_bytes, group.swap_bytes) == (200, 300, 100)
    assert (group.hits, group.oom_kills, group.high_hits) == (41, 7, 0 if host.version == 1 else 5)
    # Members of the groups below it too, the greatest first: the watched process need not be it.
    assert group.users == [MemoryUser(101, "shipper", 8 * MIB), MemoryUser(100, "server", 4 * MIB)]
    assert isinstance(whole, HostMemoryFact)
    assert (whole.total_bytes, whole.available_bytes) == (24000 << 10, 20000 << 10)
    assert (whole.stalls, whole.compact_stalls, whole.oom_kills, whole.users) == (2, 3, 4, [])


def test_users_are_looked_at_only_where_it_is_nearly_full(host: Host) -> None:
    host.process(100, "/web", 4096)
    host.group("/web", 100 * MIB, 49 * MIB, "100\n")
    assert of(host.sampler().facts([100], SECOND), MemoryCgroupFact)[0].users == []


def test_memory_high_alone_is_a_limit(tmp_path: Path) -> None:
    host = Host(tmp_path, 2)
    host.process(100, "/web", 4096)
    host.group("/web", 0, 60 * MIB, "100\n")
    (host.cgroup / "web/memory.high").write_text(f"{64 * MIB}\n")
    (group,) = of(host.sampler().facts([100], SECOND), MemoryCgroupFact)
    assert (group.limit_bytes, group.high_bytes, len(group.users)) == (0, 64 * MIB, 1)


def test_it_is_looked_at_every_few_seconds_only(host: Host) -> None:
    host.process(100, "/web", 4096)
    sampler = host.sampler()
    assert sampler.facts([100], SECOND)
    assert sampler.facts([100], SECOND + EVERY_NS - 1) == []
    assert sampler.facts([100], SECOND + EVERY_NS)


def test_what_is_gone_or_unreadable_is_left_out(host: Host) -> None:
    host.process(100, "/gone", 4096)
    (host.proc / "100/cgroup").unlink()
    host.process(102, "/gone", 4096)
    (host.proc / "102/status").write_text("Name:\tkworker\n")
    facts = host.sampler().facts([100, 101, 102], SECOND)
    assert [f.tgid for f in of(facts, MemoryFact)] == [100]
    assert of(facts, MemoryCgroupFact) == []


def test_many_processes_are_looked_at_in_turn(host: Host) -> None:
    tgids = range(100, 100 + MAX_PROCESSES + 5)
    for tgid in tgids:
        host.process(tgid, "/", 4096)
    sampler = host.sampler()
    seen = [f.tgid for n in (1, 2) for f in of(sampler.facts(tgids, n * EVERY_NS), MemoryFact)]
    assert len(seen) == 2 * MAX_PROCESSES
    assert set(seen) == set(tgids)


def test_the_hosts_greatest_are_looked_at_when_it_had_to_reclaim(host: Host) -> None:
    host.process(100, "/", 4096)
    host.process(900, "/", 9000, comm="hog")
    sampler = host.sampler()
    sampler.facts([100], SECOND)
    host.counters(1)
    for n in (1, 2):  # and are kept
        (whole,) = of(sampler.facts([100], SECOND + n * EVERY_NS), HostMemoryFact)
        assert [u.comm for u in whole.users] == ["hog", "server"]


def test_a_full_group_is_looked_at_at_once_by_its_id(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "path_of_id", lambda i, _, version: {7: "/web"}.get(i, ""))
    host.process(100, "/web", 4096)
    host.group("/web", 12 * MIB, 11 * MIB, "100\n")
    sampler = host.sampler()
    (group,) = sampler.groups({0, 7, 8}, SECOND)
    assert isinstance(group, MemoryCgroupFact)
    assert (group.path, group.limit_bytes, group.users[0].tgid) == ("/web", 12 * MIB, 100)
    assert sampler.groups({7, 8}, SECOND + 1) == []
    assert sampler.groups({7}, SECOND + EVERY_NS)
    assert len(sampler._again_ns) == 1  # what is not asked for any more is forgotten


# malloc's heaps


def heap(at: int, used: int) -> str:
    """A heap of an arena: used up to there, the rest reserved."""
    end = at + HEAP
    text = f"{at:x}-{at + used:x} rw-p 00000000 00:00 0 \n"
    return text + (f"{at + used:x}-{end:x} ---p 00000000 00:00 0 \n" if used < HEAP else "")


def test_heaps_are_told_from_other_mappings() -> None:
    base = 0x7F0000000000
    maps = heap(base, MIB) + heap(base + HEAP, 3 * MIB)
    maps += heap(base + 4 * HEAP, HEAP)  # full, nothing reserved: not told from another mapping
    maps += f"{base + 8 * HEAP:x}-{base + 8 * HEAP + MIB:x} rw-p 00000000 00:00 0 \n"  # aligned by chance
    maps += f"{base + 9 * HEAP:x}-{base + 9 * HEAP + MIB:x} rw-p 00000000 08:01 42 /lib/x.so\n"
    maps += f"{base + 11 * HEAP + PAGE:x}-{base + 11 * HEAP + MIB:x} rw-p 00000000 00:00 0 [stack]\n"
    assert heaps_in(maps) == (2, 4 * MIB)


def test_full_heaps_that_the_kernel_merged_are_counted() -> None:
    base = 0x7F0000000000
    maps = f"{base:x}-{base + HEAP + 5 * MIB:x} rw-p 00000000 00:00 0 \n"
    maps += f"{base + HEAP + 5 * MIB:x}-{base + 2 * HEAP:x} ---p 00000000 00:00 0 \n"
    assert heaps_in(maps) == (2, HEAP + 5 * MIB)


@pytest.mark.parametrize("maps", ["", "rubbish", "zz-yy rw-p 0 0 0\n", "1-2\n", "10-20 rw-p 0 0 0 \n" * 3])
def test_rubbish_has_no_heaps(maps: str) -> None:
    assert heaps_in(maps)[0] == 0


def test_maps_are_read_rarely_and_only_of_what_has_grown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(maps: str) -> tuple[int, int]:
        looks.append(len(maps))
        return 9, 5 * MIB

    monkeypatch.setattr(memfacts, "heaps_in", look)
    sampler, now = host.sampler(), SECOND

    def sample(anon_mib: int, after_ns: int = EVERY_NS) -> MemoryFact:
        nonlocal now
        now += after_ns
        host.process(100, "/", anon_mib << 10, maps="x" * 100)
        (fact,) = of(sampler.facts([100], now), MemoryFact)
        assert isinstance(fact, MemoryFact)
        return fact

    assert sample(16).heaps == 0  # small: not worth it
    assert (sample(100).heaps, looks) == (9, [100])
    assert sample(900).heaps == 9
    assert len(looks) == 1  # grown, but looked at just now
    assert sample(101, HEAPS_AGAIN_NS).heaps_ns == 3 * EVERY_NS - EVERY_NS + SECOND
    assert len(looks) == 1  # not grown
    assert sample(140).heaps_ns == now
    assert len(looks) == 2


# the history


def sample(at_s: float, anon: int, tgid: int = 100) -> MemoryFact:
    return MemoryFact(tgid=tgid, ts_ns=round(at_s * SECOND), anon_bytes=anon)


def test_samples_are_kept_a_while_apart_and_the_last_is_the_newest() -> None:
    memory = Memory()
    for i in range(20):
        memory.put(sample(i * 4, i))
    kept = memory.history(100)
    assert [s.ts_ns // SECOND for s in kept] == [0, 32, 64, 76]
    assert memory.process(100) == sample(76, 19)
    for i in range(4 * HISTORY):
        memory.put(sample(100 + i * 30, i))
    assert len(memory.history(100)) == HISTORY
    assert memory.history(101) == []
    assert memory.process(101) is None


def test_limits_are_those_of_the_groups_a_process_is_in_innermost_first() -> None:
    memory = Memory()
    memory.put(MemoryFact(tgid=100, ts_ns=1, cgroup="/pods/web/c1"))
    for i, path in enumerate(["/pods", "/pods/web/c1", "/pods/web2", "/pods/we"], start=1):
        memory.put(MemoryCgroupFact(path, i, 1, limit_bytes=MIB))
    assert [g.path for g in memory.limits(100)] == ["/pods/web/c1", "/pods"]
    assert memory.limits(7) == []
    assert memory.cgroup(0) is None


def test_an_oom_kill_is_remembered_with_its_name_and_bounded() -> None:
    facts = Facts()
    b = EventBuilder().oom(5, 300, "evil\x1b[31m", asker=7, cgroup_id=4, anon_pages=2, limit_pages=8)
    b.oom(6, 301)
    facts.update(Batch(0, b.chunk()), SCHEMA)
    first, second = facts.memory.victims(0, ns(100))
    assert (first.tgid, first.cgroup_id, first.asker_tgid) == (300, 4, 7)
    assert "\x1b" not in first.name
    assert second.name == ""
    assert facts.memory.killed(300, first.ts_ns + 1) == first
    assert facts.memory.killed(300, first.ts_ns - 1) is None
    assert facts.memory.killed(300, first.ts_ns + DYING_NS + 1) is None
    assert facts.memory.killed(302, first.ts_ns + 1) is None
    for i in range(200):
        facts.update(Batch(0, EventBuilder().oom(10 + i, 400 + i).chunk()), SCHEMA)
    assert len(facts.memory.victims(0, ns(1000))) == 64


def test_facts_of_memory_reach_their_place() -> None:
    facts, group, whole = Facts(), MemoryCgroupFact("/web", 7, 1), HostMemoryFact(1)
    facts.update(Batch(0, np.empty(0, EVENT), facts=[sample(1, 2), group, whole]), SCHEMA)
    assert facts.memory.process(100) == sample(1, 2)
    assert facts.memory.cgroup(7) == group
    assert facts.memory.host == whole


ARENAS = 13
THREADS_THAT_MALLOC = f"""\
import ctypes, sys, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
ready, go = threading.Barrier({ARENAS} + 1), threading.Event()

def work():
    for _ in range(50):  # each below the size from which malloc maps memory of its own
        libc.memset(ctypes.c_void_p(libc.malloc(100_000)), 1, 100_000)
    ready.wait()
    go.wait()

for _ in range({ARENAS}):
    threading.Thread(target=work, daemon=True).start()
ready.wait()
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_arenas_of_a_real_process_are_counted() -> None:
    env = {**os.environ, "MALLOC_ARENA_MAX": "64"}
    child = subprocess.Popen(
        [sys.executable, "-c", THREADS_THAT_MALLOC],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )
    try:
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            pytest.skip("no malloc of this kind here")
        (fact,) = of(Sampler().facts([child.pid], SECOND), MemoryFact)
        assert fact.heaps >= ARENAS, Path(f"/proc/{child.pid}/maps").read_text()
        assert fact.heap_bytes >= ARENAS * 50 * 100_000
        assert fact.anon_bytes >= fact.heap_bytes // 2
    finally:
        child.kill()
        child.communicate()
