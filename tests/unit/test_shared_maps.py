"""How the rings' memory is divided."""

from __future__ import annotations

import mmap

import pytest
from whyspan.config import Collector
from whyspan_probes.shared_maps import MAX_RING_BYTES, MAX_SHARDS, shard_plan

CPUS = range(1, 513)
SIZES = (64 << 10, 1 << 20, (1 << 20) + 1, 8 << 20, 15_000_000, 16 << 20, 1 << 30)


def is_power_of_two(n: int) -> bool:
    return n > 0 and not n & (n - 1)


@pytest.mark.parametrize("total", SIZES)
def test_every_plan_is_one_the_kernel_takes_and_within_bounds(total: int) -> None:
    for cpus in CPUS:
        shards, each = shard_plan(cpus, total)
        assert is_power_of_two(shards)
        assert is_power_of_two(each)
        assert each >= mmap.PAGESIZE
        assert shards <= MAX_SHARDS
        used = shards * each
        assert used <= MAX_RING_BYTES == 16 << 20
        # What was asked for is not exceeded, but for a page a ring; and at least half of it is used.
        assert used <= max(total, shards * mmap.PAGESIZE)
        assert used * 2 > min(total, MAX_RING_BYTES)


def test_a_ring_serves_at_most_four_cpus_up_to_the_limit() -> None:
    before = 0
    for cpus in CPUS:
        shards, _ = shard_plan(cpus, 8 << 20)
        assert shards >= before
        assert shards * 4 >= cpus or shards == MAX_SHARDS
        assert shards == 1 or shards <= cpus
        before = shards


@pytest.mark.parametrize(
    ("cpus", "shards"),
    [(1, 1), (2, 2), (4, 2), (8, 2), (9, 4), (16, 4), (17, 8), (64, 16), (256, 64), (512, 64)],
)
def test_known_plans(cpus: int, shards: int) -> None:
    assert shard_plan(cpus, Collector().ring_bytes) == (shards, (8 << 20) // shards)
