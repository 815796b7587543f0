"""USDT notes: arguments as compilers write them, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from whyspan_probes import usdt

CONSTANT, REGISTER, MEMORY = 1, 2, 3


def cookie(kind: int, size: int, *, signed: bool = False, register: int = 0, number: int = 0) -> int:
    """As usdt.bpf.h takes it apart."""
    return kind << 8 | size << 10 | signed << 14 | register << 16 | (number & 0xFFFFFFFF) << 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-4@112(%rsp)", cookie(MEMORY, 4, signed=True, register=152, number=112)),
        ("-4@-20(%rbp) 8@%rax", cookie(MEMORY, 4, signed=True, register=32, number=-20)),
        ("8@(%rdi)", cookie(MEMORY, 8, register=112)),
        ("-8@%r12", cookie(REGISTER, 8, signed=True, register=24)),
        ("-4@%r12d", cookie(REGISTER, 4, signed=True, register=24)),
        ("-4@%ebp", cookie(REGISTER, 4, signed=True, register=32)),
        ("1@%al", cookie(REGISTER, 1, register=80)),
        ("2@%bx", cookie(REGISTER, 2, register=40)),
        ("1@%sil", cookie(REGISTER, 1, register=104)),
        ("-4@$2", cookie(CONSTANT, 4, signed=True, number=2)),
        ("-4@$-1", cookie(CONSTANT, 4, signed=True, number=-1)),
        ("1@%ah", 0),  # not the low byte
        ("8@16(%rax,%rdx)", 0),
        ("8@name(%rip)", 0),
        ("8@%xmm0", 0),
        ("", 0),
    ],
)
def test_where_an_argument_lies(text: str, expected: int) -> None:
    assert usdt.argument(text, "x86_64") == expected


def test_arguments_of_other_machines_are_not_known() -> None:
    assert usdt.argument("-4@[sp, 40]", "aarch64") == 0
    assert usdt.argument("-4@$2", "aarch64") == 0


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01\x01" + bytes(200)])
def test_a_file_that_is_none_has_no_notes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert usdt.find(fd, {"python:gc__start"}) == []
    finally:
        os.close(fd)
