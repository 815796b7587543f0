"""Facts of storage out of a made-up /proc and /sys: cleaned, bounded, asked for once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from whyspan import diskfacts
from whyspan.diskfacts import DiskFacts, mapped_facts, writer_facts
from whyspan.disknames import disk_facts, swap_fact
from whyspan.model import DiskFact, Fact, MappedFact, SwapFact, WriterFact
from whyspan.storage import Storage

from tests.unit.timeline import LOOP, SCHEMA, SERVER, EventBuilder

DISK = 8 << 20 | 1
LINE = "7f0000000000-7f0000001000 r--s 00000000 {dev} {inode}                 {path}\n"


def proc_with(tmp_path: Path, *lines: tuple[str, int, str]) -> Path:
    folder = tmp_path / "proc" / str(SERVER)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(LINE.format(dev=dev, inode=inode, path=path) for dev, inode, path in lines)
    (folder / "maps").write_text(text)
    return tmp_path / "proc"


def test_a_mapped_file_is_known_by_inode_and_device(tmp_path: Path) -> None:
    proc = proc_with(
        tmp_path, ("08:02", 5, "/other"), ("08:01", 5, "/models/a b.bin"), ("00:00", 0, "[heap]")
    )
    assert mapped_facts(SERVER, [(5, DISK)], proc) == [MappedFact(SERVER, 5, DISK, "/models/a b.bin")]
    assert mapped_facts(SERVER, [(6, DISK)], proc) == []
    assert mapped_facts(999, [(5, DISK)], proc) == []


def test_an_overlays_mapping_is_known_by_its_inode_alone(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, ("00:30", 5, "/models/a.bin"))
    assert mapped_facts(SERVER, [(5, DISK)], proc) == [MappedFact(SERVER, 5, DISK, "/models/a.bin")]
    # Of two files with that number it cannot be told which it is.
    assert mapped_facts(SERVER, [(5, DISK), (5, DISK + 1)], proc) == []


def test_paths_are_cleaned(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, ("08:01", 5, "/m/\x1b[31mred\\012line.bin (deleted)"))
    (fact,) = mapped_facts(SERVER, [(5, DISK)], proc)
    assert isinstance(fact, MappedFact)
    assert fact.path == "/m/\\x1b[31mred\\x0aline.bin (deleted)"


def test_reading_mappings_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: Any) -> None:
    proc = proc_with(tmp_path, *(("08:01", n, f"/f{n}") for n in range(1, 1001)))
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert mapped_facts(SERVER, [(1000, DISK)], proc) == []
    assert len(mapped_facts(SERVER, [(255, DISK)], proc)) == 1


def waits(inodes: range) -> EventBuilder:
    b = EventBuilder()
    for i in inodes:
        b.add("page_wait", i, LOOP, aux=3, inode=i, dev=DISK, pages=1, syscall_nr=-1)
    return b


def test_a_file_is_looked_for_once(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[set[tuple[int, int]]] = []

    def look(tgid: int, files: set[tuple[int, int]], proc: Path) -> list[Fact]:
        asked.append(set(files))
        return []

    monkeypatch.setattr(diskfacts, "mapped_facts", look)
    looked = DiskFacts(SCHEMA, tmp_path, tmp_path)
    looked.facts(waits(range(1, 4)).chunk(), 1.0)
    looked.facts(waits(range(1, 5)).chunk(), 2.0)
    assert asked == [{(1, DISK), (2, DISK), (3, DISK)}, {(4, DISK)}]


def test_few_processes_are_read_per_batch_and_the_others_later(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[int] = []

    def look(tgid: int, files: set[tuple[int, int]], proc: Path) -> list[Fact]:
        asked.append(tgid)
        return []

    monkeypatch.setattr(diskfacts, "mapped_facts", look)
    b = EventBuilder()
    for tid in (201, 202, 203):
        b.add("page_wait", 1, tid, aux=3, inode=1, dev=DISK)
    looked = DiskFacts(SCHEMA, tmp_path, tmp_path)
    for second in (1.0, 2.0, 3.0):
        looked.facts(b.chunk(), second)
    assert asked == [201, 202, 203]


def test_disks_and_file_systems_are_named_with_their_mounts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(
        "30 1 8:1 / /var/my\\040models rw - ext4 /dev/sda1 rw\n"
        "31 1 0:52 / /mnt/nfs rw - nfs4 filer:/models rw\n"
        "32 1 broken\n"
    )
    sys = tmp_path / "sys"
    disk = sys / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1" / "partition").write_text("1\n")
    (sys / "dev" / "block").mkdir(parents=True)
    (sys / "dev" / "block" / "8:0").symlink_to("../../devices/sda")
    (sys / "dev" / "block" / "8:1").symlink_to("../../devices/sda/sda1")
    assert disk_facts([8 << 20, DISK, 52, 99], tmp_path, sys) == [
        DiskFact(8 << 20, "sda", ("/var/my models",)),
        DiskFact(DISK, "sda1", ("/var/my models",)),
        DiskFact(52, "nfs4 filer:/models", ("/mnt/nfs",)),
    ]


def test_swap_is_read_when_a_fault_may_be_for_it(tmp_path: Path) -> None:
    (tmp_path / "swaps").write_text(
        "Filename\tType\tSize\tUsed\tPriority\n/swap\\040file  file 1048572 0 -2\n"
    )
    assert swap_fact(tmp_path) == SwapFact((), ("file /swap\\040file",))
    b = EventBuilder().add("page_wait", 1, LOOP, aux=8)
    looked = DiskFacts(SCHEMA, tmp_path, tmp_path)
    assert looked.facts(waits(range(1, 2)).chunk(), 1.0) == []
    assert looked.facts(b.chunk(), 2.0) == [swap_fact(tmp_path)]
    assert looked.facts(b.chunk(), 9.0) == []  # the same


def writer(tmp_path: Path, pid: int, target: str, inode: int, mode: int) -> None:
    folder = tmp_path / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "fdinfo").mkdir()
    (folder / "fd" / "3").symlink_to(target)
    (folder / "fdinfo" / "3").write_text(f"pos:\t0\nflags:\t01\nino:\t{inode}\n")
    (folder / "comm").write_text("trainer\x1b[0m\n")


def test_a_writer_is_found_by_name_and_inode(tmp_path: Path) -> None:
    writer(tmp_path, 70, "/data/a-very-long-snapshot.bin", 7, 0o700)
    writer(tmp_path, 71, "/data/a-very-long-snapshot.bin", 8, 0o700)
    wanted = [(DISK, 7, b"a-very-long-sna")]
    # A link that one makes says that it may be written through, as that of a descriptor open for writing does.
    assert writer_facts(wanted, tmp_path) == [
        WriterFact(DISK, 7, 70, "trainer\\x1b[0m", "/data/a-very-long-snapshot.bin")
    ]
    assert writer_facts([(DISK, 9, b"a-very-long-sna")], tmp_path) == []
    assert writer_facts(wanted, tmp_path, limit=0) == []


def test_writers_are_looked_for_only_beside_an_fsync(tmp_path: Path) -> None:
    writer(tmp_path, 70, "/data/s.bin", 7, 0o700)
    b = EventBuilder().add("file_flush", 1, 30, aux=2, inode=7, dev=DISK, pages=100, file=b"s.bin")
    looked = DiskFacts(SCHEMA, tmp_path, tmp_path)
    assert looked.facts(b.chunk(), 1.0) == []
    b = EventBuilder().add("fd_block", 2, LOOP, aux=1, inode=4, dev=DISK, syscall_nr=74)
    (fact,) = looked.facts(b.chunk(), 2.0)
    assert isinstance(fact, WriterFact)
    assert fact.tgid == 70


def test_storage_is_bounded_and_words_are_found_for_what_is_not_known() -> None:
    known = Storage(files=2)
    for i in range(5):
        known.put(MappedFact(1, i, DISK, f"/f{i}"))
    assert [known.mapped(1, i, DISK) for i in (0, 3, 4)] == ["", "/f3", "/f4"]
    assert known.device(DISK) == "device 8:1"
    assert known.swap_names() == "swap"
    assert known.writer(DISK, 1) is None
