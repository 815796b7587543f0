"""Facts of processes that are not watched: bounded, once, and from the cgroup's id when they are gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whyspan import cgroups
from whyspan.model import ProcessFact
from whyspan.pipeline import strangers
from whyspan.pipeline.strangers import Strangers
from whyspan_probes.schema import Events

GONE = 2**22 + 17
ID = "5d" * 32
NAMES: np.dtype[Any] = np.dtype(
    [("tid", "<u4"), ("tgid", "<u4"), ("comm", "S16"), ("cgroup_id", "<u8"), ("flags", "<u4")]
)


def named(*rows: tuple[int, bytes, int, int]) -> Events:
    return np.array([(tgid + 1, tgid, comm, cgroup, flags) for tgid, comm, cgroup, flags in rows], NAMES)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for tgid in range(GONE, GONE + 100):
        folder = tmp_path / str(tgid)
        folder.mkdir()
        (folder / "comm").write_text(f"hog-{tgid - GONE}\n")
        (folder / "cgroup").write_text(f"0::/docker/{ID}\n")
    return tmp_path


def test_a_living_process_is_described_once_in_a_while(proc: Path) -> None:
    s = Strangers(proc)
    (fact,) = s.facts(named((GONE, b"thread", 9, 0), (GONE, b"another", 9, 0)), 1.0)
    assert isinstance(fact, ProcessFact)
    assert (fact.tgid, fact.comm, fact.service) == (GONE, "hog-0", "")
    assert (fact.cgroup, fact.container_id) == (f"/docker/{ID}", ID)
    assert s.facts(named((GONE, b"thread", 9, 0)), 2.0) == []
    assert len(s.facts(named((GONE, b"thread", 10, 0)), 3.0)) == 1  # it was moved
    assert len(s.facts(named((GONE, b"thread", 9, 0)), 302.0)) == 1


def test_kernel_threads_are_not_described(proc: Path) -> None:
    assert Strangers(proc).facts(named((GONE, b"kworker", 1, 0x00200000)), 1.0) == []


def test_a_batch_is_bounded_and_the_rest_comes_with_its_next_name(proc: Path) -> None:
    s = Strangers(proc)
    rows = named(*((GONE + n, b"x", 9, 0) for n in range(100)))
    first, second = s.facts(rows, 1.0), s.facts(rows, 1.5)
    assert (len(first), len(second)) == (16, 16)
    assert len({f.tgid for f in (*first, *second) if isinstance(f, ProcessFact)}) == 32


def test_what_is_gone_is_known_by_its_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {77: f"/system.slice/docker-{ID}.scope"}
    monkeypatch.setattr(cgroups, "path_of_id", lambda number, _: paths.get(number, ""))
    rows = named((GONE, b"gone\x1b[2J", 77, 0), (GONE + 1, b"unknown", 78, 0))
    assert Strangers(tmp_path).facts(rows, 1.0) == [
        ProcessFact(GONE, "gone\\x1b[2J", cgroup=f"/system.slice/docker-{ID}.scope", container_id=ID)
    ]


def test_this_process() -> None:
    (fact,) = Strangers().facts(named((os.getpid(), b"x", 1, 0)), 1.0)
    assert isinstance(fact, ProcessFact)
    assert fact.start_ticks > 0
    assert strangers._MAX_PER_BATCH == 16
