"""What a process maps as code: lists of mappings, also those that mean harm, and what a file is told by."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from whyspan.code import files, maps, returns
from whyspan.code.maps import Mapping

LIST = rb"""55d000000000-55d000001000 r--p 00000000 fe:00 7 /srv/server
55d000001000-55d000003000 r-xp 00001000 fe:00 7 /srv/server
7f0000000000-7f0000001000 rwxp 00000000 00:00 0
7f0000002000-7f0000003000 r-xs 00000000 00:01 9 /dev/zero (deleted)
7f0000004000-7f0000005000 r-xp 00026000 fe:00 8 /usr/lib/with blank\012and line.so (deleted)
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]
"""


def test_code_by_address() -> None:
    m = maps.parse(LIST)
    assert [x.start for x in m.all] == sorted(x.start for x in m.all)
    assert len(m.all) == 5
    assert m.at(0x55D000000FFF) is None
    assert m.at(0x55D000001000) == Mapping(0x55D000001000, 0x55D000003000, 0x1000, "/srv/server", 7)
    assert m.at(0x55D000002FFF) is not None
    assert m.at(0x55D000003000) is None
    assert m.at(0) is None and m.at(1 << 64) is None


def test_what_is_a_files_and_what_is_not() -> None:
    shown = {x.name: x.of_file for x in maps.parse(LIST).all}
    assert shown == {
        "server": True,
        "(anonymous)": False,
        "with blank\nand line.so": True,
        "[vdso]": False,
    }
    assert [x.name for x in maps.parse(LIST).all].count("(anonymous)") == 2


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"x",
        b"- r-xp 0 0 0 /a",
        b"zz-yy r-xp 00000000 fe:00 7 /a",
        b"10-20 r-xp zz fe:00 7 /a",
        b"10-20 r-xp 0 fe:00 seven /a",
        b"10-20",
        b"\xff\xfe r-xp 0 0 0 \xff",
    ],
)
def test_lines_that_are_none_are_left_out(line: bytes) -> None:
    assert len(maps.parse(line + b"\n" + LIST + line).all) == 5


def test_a_name_may_be_no_text() -> None:
    (one,) = maps.parse(b"1000-2000 r-xp 0 fe:00 7 /srv/\xff\x1b[31m\n").all
    assert os.fsencode(one.path) == b"/srv/\xff\x1b[31m"


def test_a_huge_list_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7").mkdir()
    rows = b"".join(b"%x-%x r-xp 0 fe:00 7 /a\n" % (i << 12, (i + 1) << 12) for i in range(1, 20_000))
    (tmp_path / "7" / "maps").write_bytes(rows)
    found = maps.read(7, tmp_path)
    assert found is not None and len(found.all) == maps._MAX_CODE
    monkeypatch.setattr(maps, "_MAX_BYTES", 100)
    found = maps.read(7, tmp_path)
    assert found is not None and len(found.all) < 6


def test_a_process_that_has_ended_has_none(tmp_path: Path) -> None:
    assert maps.read(7, tmp_path) is None
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").touch()
    assert maps.read(7, tmp_path) is None


def test_a_file_is_told_by_what_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    s = path.stat()
    first = files.identify(str(path))
    assert first == (
        os.major(s.st_dev),
        os.minor(s.st_dev),
        s.st_ino,
        s.st_size,
        s.st_mtime_ns,
        s.st_ctime_ns,
    )
    os.utime(path, ns=(1, 2))
    assert files.identify(str(path)) != first
    assert files.identify(str(tmp_path / "b")) is None


@pytest.mark.parametrize(
    ("code", "is_call"),
    [
        ("0000e800000000", True),  # call rel32
        ("0000000000ffd0", True),  # call *%rax
        ("00000000" + "41ffd4", True),  # call *%r12
        ("0000000000ff10", True),  # call *(%rax)
        ("00000000ff5008", True),  # call *8(%rax)
        ("000000ff542408", True),  # call *8(%rsp)
        ("00ff1500000000", True),  # call *rel32(%rip)
        ("ff942400000000", True),  # call *disp32(%rsp)
        ("0000e900000000", False),  # jmp
        ("0000000000ffe0", False),  # jmp *%rax
        ("90909090909090", False),
        ("00e8000000", False),
        ("", False),
    ],
)
def test_what_is_in_front_of_an_address_to_return_to(code: str, is_call: bool) -> None:
    assert returns.x86_64(bytes.fromhex(code)) is is_call


@pytest.mark.parametrize(
    ("word", "is_call"),
    [(0x94000010, True), (0xD63F0100, True), (0xD73F0911, True), (0x14000010, False), (0xD61F0100, False)],
)
def test_calls_of_arm64(word: int, is_call: bool) -> None:
    assert returns.aarch64(b"\0\0\0" + word.to_bytes(4, "little")) is is_call


def test_a_real_address_to_return_to_follows_a_call() -> None:
    seen: list[bytes] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None)
    libc.backtrace.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def compare(_: int, __: int) -> int:
        found = (ctypes.c_void_p * 8)()
        n = libc.backtrace(found, 8)
        seen.extend(ctypes.string_at(a - returns.BYTES, returns.BYTES) for a in found[1:n] if a)
        return 0

    two = (ctypes.c_int * 2)(1, 2)
    libc.qsort(two, 2, 4, kind(compare))
    assert len(seen) > 2
    assert all(returns.follows_call(code) for code in seen)
