"""Which descriptors are looked up, and how often."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from whyspan.fdfacts import MAX_PER_BATCH, FdFacts
from whyspan.model import FdFact
from whyspan_probes.schema import Events

from tests.unit.timeline import FSYNC, SCHEMA, EventBuilder

FILE, PIPE, SOCKET = 1, 3, 4


def blocks(*on: tuple[int, int, int]) -> Events:
    """Blocks of this process on (fd, inode, kind of file)."""
    events = EventBuilder()
    for i, (fd, inode, kind) in enumerate(on):
        events.add("fd_block", float(i), os.getpid(), aux=kind, inode=inode, fd=fd, syscall_nr=FSYNC)
    return SCHEMA.select(events.chunk(), "fd_block")


class Looks:
    """Answers with what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, tgid: int, fd: int, inode: int) -> FdFact:
        self.asked.append((fd, inode))
        return FdFact(tgid, fd, inode, "", "", 0, "")


@pytest.fixture
def looks() -> Looks:
    """What the descriptors of the tests are looked up with."""
    return Looks()


def test_a_file_is_looked_at_each_time_it_blocks_somebody(looks: Looks) -> None:
    facts = FdFacts(looks)
    for _ in range(3):
        assert len(facts.of(blocks((8, 12, FILE), (8, 12, FILE)))) == 1
    assert looks.asked == [(8, 12)] * 3


def test_what_cannot_become_another_is_looked_at_once(looks: Looks) -> None:
    facts = FdFacts(looks)
    for _ in range(3):
        facts.of(blocks((4, 40, SOCKET), (5, 50, PIPE)))
    assert looks.asked == [(4, 40), (5, 50)]


def test_new_descriptors_go_before_files_already_known(looks: Looks) -> None:
    facts = FdFacts(looks)
    files = [(100 + i, 1000 + i, FILE) for i in range(MAX_PER_BATCH)]
    facts.of(blocks(*files))
    looks.asked.clear()
    facts.of(blocks(*files, (900, 9000, SOCKET)))
    assert looks.asked[0] == (900, 9000)
    assert len(looks.asked) == MAX_PER_BATCH


def test_no_blocks_no_looks(looks: Looks) -> None:
    assert FdFacts(looks).of(blocks()) == []
    assert looks.asked == []


def test_the_next_file_with_the_same_inode_and_number_is_known_by_its_name(tmp_path: Path) -> None:
    # As a new file system's first file has it, or whoever gets the inode of a file that is gone.
    facts = FdFacts()
    path = tmp_path / "data"
    with path.open("w") as f:
        at = f.fileno(), os.fstat(f.fileno()).st_ino, FILE
        names = []
        for name in ("data", "serving.log"):
            path = path.rename(tmp_path / name)
            names += [fact.path for fact in facts.of(blocks(at)) if isinstance(fact, FdFact)]
    assert names == [str(tmp_path / "data"), str(tmp_path / "serving.log")]
