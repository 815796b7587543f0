"""block_io: requests of a child to the disk under the test's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bpf.conftest import Spawn, Watch
from tests.bpf.disk import disk_of

pytestmark = pytest.mark.bpf

WRITE = 1


def test_direct_writes_are_requests_of_their_thread(watch: Watch, spawn: Spawn, disk_dir: Path) -> None:
    disk = disk_of(disk_dir)
    assert disk is not None
    w, child = watch("block_io"), spawn("direct_writes", disk_dir / "direct", 31)
    w.watch(child.tgid)
    span = child.run()
    rows = w.rows("block_done", tid=child.tgid, bytes=4096)
    rows = rows[rows["issue_ns"] >= span["begin_ns"]]
    rows = rows[(rows["aux"] & WRITE) != 0]
    assert len(rows) == 31
    assert len(set(rows["sector"].tolist())) == 31
    assert (rows["dev"] == (disk[0] << 20 | disk[1])).all()
    assert (rows["issue_ns"] + rows["latency_ns"] == rows["ts_ns"]).all()
    assert (rows["ts_ns"] <= span["end_ns"]).all()
    assert (rows["latency_ns"] > 1_000).all()
    # One at a time: together they took no longer than the caller saw.
    assert int(rows["latency_ns"].sum()) <= span["end_ns"] - span["begin_ns"]


def test_a_neighbours_requests_are_recorded_from_the_threshold_on(
    watch: Watch, spawn: Spawn, disk_dir: Path
) -> None:
    everything = watch("block_io", config={"block_io": {"slow_ns": 0}})
    nothing = watch("block_io", config={"block_io": {"slow_ns": 3600 * 10**9}})
    child = spawn("direct_writes", disk_dir / "neighbour", 17)  # watched by nobody
    child.run()
    assert everything.count("block_done", tid=child.tgid, bytes=4096) >= 17
    assert nothing.count("block_done") == 0
