"""reclaim: memory-cgroup reclaim and OOM kills of children in cgroups of their own."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from whyspan_probes.kernel_btf import KernelBtf

from tests.bpf.conftest import Spawn, Watch
from tests.bpf.memory_group import memory_group

pytestmark = pytest.mark.bpf

LIMIT = 41 << 20
#: A record for each call, however short.
EVERY = {"reclaim": {"least_ns": 0, "gap_ns": 0}}
#: Typed programs, and those for a kernel without BTF.
either = pytest.mark.parametrize("kernel", [KernelBtf.find(), KernelBtf(own=False)], ids=["typed", "raw"])


@either
def test_reclaim_at_a_limit_is_the_threads_and_names_the_group(
    kernel: KernelBtf, watch: Watch, spawn: Spawn, disk_dir: Path
) -> None:
    with memory_group("cache", LIMIT) as group:
        every, merged = watch("reclaim", config=EVERY, kernel=kernel), watch("reclaim", kernel=kernel)
        child = spawn("fills_cache", disk_dir, 131, 3, before=group.join)
        every.watch(child.tgid)
        merged.watch(child.tgid)
        span = child.run()
        calls = every.rows("memcg_reclaim", tid=child.facts["tid"])
        assert len(calls) >= 13
        assert (calls["calls"] == 1).all()
        assert set(calls["cgroup_id"].tolist()) == {group.id}
        assert set((calls["limit_pages"] * mmap.PAGESIZE).tolist()) == {LIMIT}
        assert (calls["begin_ns"] < calls["ts_ns"]).all()
        assert (calls["begin_ns"] >= span["begin_ns"]).all()
        assert (calls["ts_ns"] <= span["end_ns"]).all()
        # One after the other, and each as long as it says.
        assert (calls["begin_ns"][1:] >= calls["ts_ns"][:-1]).all()
        assert (abs(calls["busy_us"] - (calls["ts_ns"] - calls["begin_ns"]) / 1000) <= 1).all()
        # At least what does not fit was freed.
        assert int(calls["pages"].sum()) * mmap.PAGESIZE >= (131 << 20) - LIMIT
        rows = merged.rows("memcg_reclaim", tid=child.facts["tid"])
        assert (rows["busy_us"] >= 200).all()
        assert len(rows) < len(calls)
        told, whole = int(rows["busy_us"].sum()), int(calls["busy_us"].sum())
        assert told <= whole + 2 * len(calls)
        assert every.count("direct_reclaim") == 0
        child.end()


@either
def test_an_oom_kill_names_the_victim_the_group_and_its_memory(
    kernel: KernelBtf, watch: Watch, spawn: Spawn
) -> None:
    with memory_group("oom", LIMIT) as group:
        w = watch("reclaim", "sched", kernel=kernel)
        child = spawn("touches", 257, before=group.join)
        w.watch(child.tgid)
        child.say()
        w.wait(lambda: w.count("oom_name", tgid=child.tgid), "the victim is named")
        (victim,), (name,) = w.rows("oom_victim", tgid=child.tgid), w.rows("oom_name", tgid=child.tgid)
        assert group.kills() == 1
        assert victim["cgroup_id"] == group.id
        assert int(victim["limit_pages"]) * mmap.PAGESIZE == LIMIT
        used = int(victim["anon_pages"]) * mmap.PAGESIZE
        assert LIMIT // 2 < used <= LIMIT
        assert bytes(name["comm"]).startswith(b"python")
        assert name["asker_tgid"] == child.tgid
        w.wait(lambda: w.count("sched_exit", tgid=child.tgid, aux=1), "it has ended")
        (gone,) = w.rows("sched_exit", tgid=child.tgid, aux=1)
        assert gone["exit_code"] & 0x7F == 9
        assert gone["ts_ns"] >= victim["ts_ns"]


def test_who_died_in_reclaim_leaves_nothing_open(watch: Watch, spawn: Spawn) -> None:
    with memory_group("dies", LIMIT) as group:
        w = watch("reclaim", config=EVERY)
        for _ in range(3):
            child = spawn("touches", 257, before=group.join)
            w.watch(child.tgid)
            child.say()
            w.wait(lambda c=child: w.count("oom_victim", tgid=c.tgid), "the victim is marked")  # type: ignore[misc]
            rows = w.rows("memcg_reclaim", tgid=child.tgid)
            assert len(rows)
            assert (rows["begin_ns"] <= rows["ts_ns"]).all()
        assert w.dropped() == 0


def test_an_unwatched_neighbour_is_not_recorded_but_its_kill_is(watch: Watch, spawn: Spawn) -> None:
    with memory_group("stranger", LIMIT) as group:
        w = watch("reclaim", config=EVERY)
        child = spawn("touches", 257, before=group.join)
        child.say()
        w.wait(lambda: w.count("oom_victim", tgid=child.tgid), "the victim is marked")
        assert w.count("memcg_reclaim") == 0
