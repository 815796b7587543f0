"""Records of the ring of stacks, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from whyspan.code.kernelsymbols import KernelSymbols
from whyspan.code.stacks import parse

HEAD = struct.Struct("<QIHBBI4x")


def test_a_record_is_taken_apart() -> None:
    words = (1, 2, 3, 0x10, 0x7 << 32 | 40, 0x20, 0x8 << 32 | 0xFFFFFFFF)
    raw = parse(HEAD.pack(9, 100, 1, 1, 2, 2) + struct.pack("<7Q", *words))
    assert raw is not None
    assert (raw.id, raw.tgid, raw.flags, raw.kernel, raw.user) == (9, 100, 1, (1,), (2, 3))
    assert raw.python == ((0x10, 7, 40), (0x20, 8, 0xFFFFFFFF))


def test_one_that_is_cut_off_is_none() -> None:
    whole = HEAD.pack(9, 100, 1, 1, 2, 2) + bytes(56)
    assert parse(whole) is not None
    assert [parse(whole[:n]) for n in range(len(whole))] == [None] * len(whole)


@given(st.binary(max_size=4000))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    raw = parse(data)
    assert raw is None or len(raw.kernel) + len(raw.user) + 2 * len(raw.python) <= len(data) // 8


def test_functions_of_the_kernel_by_address(tmp_path: Path) -> None:
    table = tmp_path / "kallsyms"
    table.write_text("ff10 T b\nff00 t a\nff08 d data\nff20 T c\t[module]\n")
    names = KernelSymbols(table)
    assert [names.name(a) for a in (0xFEFF, 0xFF00, 0xFF0F, 0xFF10, 0xFF99)] == ["", "a", "a", "b", "c"]
    table.write_text("0 T a\n0 T b\n")
    assert KernelSymbols(table).name(5) == ""
    assert KernelSymbols(tmp_path / "none").name(5) == ""
    table.write_text("not a table\n")
    assert KernelSymbols(table).name(5) == ""
