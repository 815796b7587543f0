"""faults and the write-back records of block_io, on loop devices: as many as the kernel counts, and whose."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan.diskfacts import DiskFacts, mapped_facts
from whyspan.model import DiskFact, MappedFact, SwapFact, WriterFact

from tests.bpf.conftest import Spawn, Watch
from tests.demo.procs import DemoError
from tests.faults.host import loopdisk
from tests.faults.host.groups import MemoryGroup

pytestmark = pytest.mark.bpf

FAULT, READ, SWAP = 1, 2, 8
SYNC = 2
NAME = "we\x1b[31mights.bin"
SHOWN = "we\\x1b[31mights.bin"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An ext4 file system on a loop device."""
    with contextlib.ExitStack() as undo:
        try:
            yield undo.enter_context(loopdisk.mounted(tmp_path, 96))
        except (RuntimeError, FileNotFoundError) as e:
            pytest.skip(f"no loop device: {e}")


def weights(folder: Path, megabytes: int = 32) -> Path:
    """Make a file, written to the disk."""
    path = folder / NAME
    with path.open("wb") as f:
        f.write(os.urandom(megabytes << 20))
        os.fsync(f.fileno())
    return path


def kernel_dev(node: str) -> int:
    number = os.stat(node).st_rdev
    return os.major(number) << 20 | os.minor(number)


@pytest.mark.parametrize("deleted", [False, True])
def test_every_major_fault_is_a_record_with_its_file(
    deleted: bool, watch: Watch, spawn: Spawn, disk: tuple[str, Path]
) -> None:
    node, folder = disk
    w = watch("faults", "block_io", "fds", "sched")
    child = spawn("file_faults", weights(folder), 31, *(["deleted"] if deleted else []))
    w.watch(child.tgid)
    assert child.run()["majors"] == 31
    rows = w.rows("page_wait", tgid=child.tgid, inode=child.facts["inode"])
    assert len(rows) == 31
    assert (rows["aux"] == FAULT | READ).all()
    assert (rows["syscall_nr"] == -1).all()
    assert (rows["pages"] == 1).all()
    assert (rows["dev"] == kernel_dev(node)).all()
    assert len(set(rows["index"].tolist())) == 31
    outs = w.rows("sched_switch_out", tid=child.tgid, syscall_nr=-1)
    outs = outs[(outs["aux"] & 2) != 0]
    assert len(outs) == 31
    assert (abs(outs["ts_ns"].astype(int) - rows["ts_ns"].astype(int)) < 100_000).all()
    facts = DiskFacts(w.schema).facts(w.events, 1.0)
    path = str(folder / SHOWN) + (" (deleted)" if deleted else "")
    assert MappedFact(child.tgid, child.facts["inode"], kernel_dev(node), path) in facts
    assert DiskFact(kernel_dev(node), Path(node).name, (str(folder),)) in facts
    assert DiskFacts(w.schema).facts(w.events[:0], 1.0) == []


def test_a_fault_in_a_call_is_a_record_and_what_the_call_reads_is_none(
    watch: Watch, spawn: Spawn, disk: tuple[str, Path]
) -> None:
    path = weights(disk[1])
    w = watch("faults")
    sender, reader = spawn("send_faults", path, 13), spawn("plain_reads", path, 17)
    w.watch(sender.tgid, reader.tgid)
    reader.run()
    subprocess.run(["sync"], check=True)
    os.posix_fadvise(fd := os.open(path, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert sender.run()["majors"] == 13
    rows = w.rows("page_wait", tgid=sender.tgid, inode=sender.facts["inode"])
    assert len(rows) == 13
    assert set(rows["syscall_nr"].tolist()) == {44}  # sendto
    assert w.count("page_wait", tgid=reader.tgid) == 0


def test_nobody_elses_faults_are_recorded(watch: Watch, spawn: Spawn, disk: tuple[str, Path]) -> None:
    w = watch("faults")
    child = spawn("file_faults", weights(disk[1]), 7)
    assert child.run()["majors"] == 7
    assert w.count("page_wait") == 0


def test_every_swap_in_that_sleeps_is_a_record(watch: Watch, spawn: Spawn, tmp_path: Path) -> None:
    with contextlib.ExitStack() as undo:
        try:
            group = MemoryGroup("test-swap", 0)
            undo.callback(group.remove)
            node = undo.enter_context(loopdisk.swap(tmp_path, 32))
        except (DemoError, RuntimeError, FileNotFoundError) as e:
            pytest.skip(f"no swap here: {e}")
        if group.version != 1:
            pytest.skip("empties a memory cgroup of version 1")
        child = spawn("swap_faults", 8, 29, before=group.join)
        undo.callback(child.kill)
        w = watch("faults", "block_io")
        w.watch(child.tgid)
        (group.folder / "memory.force_empty").write_text("0")
        # The interpreter's own memory is swapped out with it, and comes back, too.
        majors = child.run()["majors"]
        assert majors >= 29
        rows = w.rows("page_wait", tgid=child.tgid, inode=0)
        assert len(rows) >= 29
        assert (rows["aux"] == SWAP).all()
        assert (rows["swapped"] >= 1024).all()
        assert ((rows["syscall_nr"] == -1) & (rows["dev"] == 0)).all()
        facts = DiskFacts(w.schema).facts(w.events, 10.0)
        (swap,) = (f for f in facts if isinstance(f, SwapFact))
        assert kernel_dev(node) in swap.devs
        assert f"partition {node}" in swap.names


def test_of_ten_thousand_mappings_the_file_is_found_once_and_the_reading_ends(
    watch: Watch, spawn: Spawn, disk: tuple[str, Path], tmp_path: Path
) -> None:
    path = weights(disk[1], 1)
    many = tmp_path / "many"
    many.mkdir()
    w = watch("faults")
    child = spawn("many_mappings", many, 10_000, path)
    w.watch(child.tgid)
    child.run()
    rows = w.rows("page_wait", tgid=child.tgid, inode=child.facts["inode"])
    assert len(rows) == 1
    looked = DiskFacts(w.schema)
    found = [f for f in looked.facts(w.events, 1.0) if isinstance(f, MappedFact)]
    assert [f.path for f in found if f.inode == child.facts["inode"]] == [str(disk[1] / SHOWN)]
    assert not [f for f in looked.facts(w.events, 2.0) if isinstance(f, MappedFact)]
    # Nothing of that number is mapped: the whole list, or as much of it as may be read.
    assert mapped_facts(child.tgid, [(2**40, 1)]) == []


def test_what_a_flush_writes_back_names_the_file_and_who_has_it_open(
    watch: Watch, spawn: Spawn, disk: tuple[str, Path]
) -> None:
    node, folder = disk
    w = watch("block_io", "fds")
    child, syncer = spawn("dirties", folder / "snapshot.bin", 5), spawn("fsyncs", folder / "own.db", 3)
    w.watch(syncer.tgid)
    child.run()
    subprocess.run(["sync", "-f", folder], check=True)
    syncer.run()
    rows = w.rows("file_flush", inode=child.facts["inode"], dev=kernel_dev(node))
    assert int(rows["pages"].sum()) == 5 * 256
    assert set(rows["file"].tolist()) == {b"snapshot.bin"}
    facts = DiskFacts(w.schema).facts(w.events, 10.0)
    assert WriterFact(
        kernel_dev(node), child.facts["inode"], child.tgid, "python", str(folder / "snapshot.bin")
    ) in [_with_comm(f) for f in facts if isinstance(f, WriterFact)]
    assert w.count("file_flush", inode=syncer.facts["inode"]) == 0  # a page at a time is not worth a record


def _with_comm(fact: WriterFact) -> WriterFact:
    assert fact.comm
    return WriterFact(fact.dev, fact.inode, fact.tgid, "python", fact.path)
