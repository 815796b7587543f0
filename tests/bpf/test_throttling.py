"""sched: throttling by a CPU quota, against the kernel's own account."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from whyspan_probes.features import kernel_version
from whyspan_probes.schema import Events

from tests.bpf.conftest import Spawn, Watch
from tests.demo.cgroups import CpuGroup
from tests.demo.procs import DemoError

pytestmark = pytest.mark.bpf

THROTTLED = 2


@pytest.fixture
def group() -> Iterator[CpuGroup]:
    """A CPU group of cgroup v1 or v2; skips where neither is usable."""
    try:
        made = CpuGroup("bpf-throttling")
    except (DemoError, OSError) as e:
        pytest.skip(f"no usable CPU cgroup: {e}")
    yield made
    made.remove()


def throttled_stat_ns(group: CpuGroup) -> int:
    """The kernel's count: throttled time of the group, summed over CPUs."""
    roots = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
    (stat,) = {s for root in roots if (s := root / group.path.lstrip("/") / "cpu.stat").is_file()}
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields["throttled_time"]) if group.version == 1 else int(fields["throttled_usec"]) * 1000


def intervals_ns(outs: Events, ins: Events) -> int:
    """Time between each throttled switch-out of a thread and its next switch-in."""
    total = 0
    for out in outs[outs["flags"] & THROTTLED != 0]:
        later = ins[(ins["tid"] == out["tid"]) & (ins["ts_ns"] > out["ts_ns"])]
        total += int(later["ts_ns"][0] - out["ts_ns"]) if len(later) else 0
    return total


def test_throttled_time_agrees_with_cpu_stat(group: CpuGroup, watch: Watch, spawn: Spawn) -> None:
    w = watch("sched")
    child = spawn("burn", 2, before=group.join, cpu=1)
    group.set_quota(0.4)
    before_ns = throttled_stat_ns(group)
    w.watch(child.tgid)
    child.run()
    group.set_quota(None)
    outs, ins = w.rows("sched_switch_out", tgid=child.tgid), w.rows("sched_switch_in", tgid=child.tgid)
    throttled = outs[outs["flags"] & THROTTLED != 0]
    assert len(throttled) >= 10
    assert (throttled["aux"] == 0).all()
    counted_ns = throttled_stat_ns(group) - before_ns
    assert counted_ns > 500_000_000
    assert intervals_ns(outs, ins) == pytest.approx(counted_ns, rel=0.05)
    # The run queue's own counter, from which run-queue time after the throttling is split off.
    counters = np.concatenate([outs["throttled_ns"], ins["throttled_ns"]])
    if kernel_version(platform.release()) < (6, 6):  # "sched: Add throttled_clock_self"
        assert not counters.any()
    else:
        assert int(counters.max() - counters.min()) == pytest.approx(counted_ns, rel=0.05)


def test_without_quota_nothing_is_throttled(group: CpuGroup, watch: Watch, spawn: Spawn) -> None:
    w, child = watch("sched"), spawn("burn", 0.3, before=group.join)
    w.watch(child.tgid)
    child.run()
    outs = w.rows("sched_switch_out", tgid=child.tgid)
    assert len(outs) > 0
    assert (outs["flags"] & THROTTLED == 0).all()
