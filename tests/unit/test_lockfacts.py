"""What locks are in a process: from its maps and the files behind them, however they are."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path

import pytest
from whyspan import lockfacts
from whyspan.lockfacts import LockFacts


def fake(tmp_path: Path, lines: str, code: str = "VmExe: 1 kB\nVmLib: 2 kB\n") -> Path:
    """A /proc with process 7 in it."""
    folder = tmp_path / "7"
    folder.mkdir(exist_ok=True)
    (folder / "maps").write_text(lines)
    (folder / "status").write_text(code)
    return tmp_path


def test_this_process_has_an_interpreter_lock_and_an_arena() -> None:
    fact = LockFacts().read(os.getpid())
    assert fact.gil_end > fact.gil_start > 0
    assert fact.main_arena
    assert fact.note == ""
    assert any("libc.so" in t.path for t in fact.text)
    if sys.version_info[:2] == (3, 11):
        assert fact.gil_end - fact.gil_start == 208


def test_a_process_that_is_gone_is_nothing(tmp_path: Path) -> None:
    assert LockFacts(tmp_path).read(7).text == []


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01" + bytes(58), b"#!/bin/sh\n", os.urandom(4096)])
def test_files_that_are_no_libraries_are_said(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / "libpython3.11.so.1.0"
    library.write_bytes(content)
    inode = library.stat().st_ino
    proc = fake(tmp_path, f"1000-2000 r-xp 00000000 08:01 {inode} {library}\n")
    (tmp_path / "7" / "root").symlink_to("/")
    fact = LockFacts(proc).read(7)
    assert (fact.gil_start, fact.main_arena) == (0, 0)
    assert "libpython3.11.so.1.0" in fact.note


def test_a_static_program_has_nothing_to_tell(tmp_path: Path) -> None:
    proc = fake(tmp_path, "400000-500000 r-xp 00000000 08:01 5 /srv/server\n")
    fact = LockFacts(proc).read(7)
    assert (fact.gil_start, fact.main_arena, fact.note) == (0, 0, "")
    assert [t.path for t in fact.text] == ["/srv/server"]


def test_ten_thousand_mappings_are_read_in_bounded_time_and_space(tmp_path: Path) -> None:
    lines = "".join(
        f"{0x7000_0000_0000 + k * 0x2000:x}-{0x7000_0000_1000 + k * 0x2000:x} r-xp 00000000 08:01 9 /lib/x{k}.so\n"
        for k in range(10_000)
    )
    facts = LockFacts(fake(tmp_path, lines))
    begin = time.process_time()
    fact = facts.read(7)
    assert time.process_time() - begin < 5  # a hang, not a figure
    assert len(fact.text) == lockfacts._MAX_RANGES


def test_a_process_is_read_again_only_when_its_code_grew(tmp_path: Path) -> None:
    proc = fake(tmp_path, "")
    facts = LockFacts(proc)
    assert len(facts.follow([7], 0.0)) == 1
    assert facts.follow([7], 10.0) == []
    fake(tmp_path, "", "VmExe: 1 kB\nVmLib: 3 kB\n")
    assert len(facts.follow([7], 20.0)) == 1
    facts.again(7)
    assert len(facts.follow([7], 20.1)) == 1
    assert facts.follow([], 30.0) == []


def test_only_so_many_processes_are_read_at_a_time(tmp_path: Path) -> None:
    for tgid in range(100, 110):
        (tmp_path / str(tgid)).mkdir()
        (tmp_path / str(tgid) / "status").write_text("VmExe: 1 kB\n")
    facts = LockFacts(tmp_path)
    told = [len(facts.follow(range(100, 110), t / 10)) for t in range(4)]
    assert told == [4, 4, 2, 0]


def test_the_arena_is_decoded_from_an_instruction() -> None:
    code = b"\x55\x48\x63\xee" + b"\xf0\x0f\xb1\x15" + struct.pack("<i", -0x1234) + b"\x90"
    match = lockfacts._LOCK_CMPXCHG.search(code)
    assert match is not None
    assert match.end() == 12
    assert struct.unpack("<i", match[1]) == (-0x1234,)
    assert lockfacts._LOCK_CMPXCHG.search(b"\xf0\x0f\xb1\x17\0\0\0\0") is None  # (%rdi): not its own variable
