"""Stacks and their names: which frames can be true, the symboliser's protocol, and answers that are none."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from whyspan.burst import allocators, stacks
from whyspan.burst.allocators import Size
from whyspan.burst.stacks import Code
from whyspan.code.maps import Mapping, Maps

LIBC = Mapping(0x7F00_0000_0000, 0x7F00_0010_0000, 0x26000, "/usr/lib/libc.so.6", 1)
PROGRAM = Mapping(0x5500_0000_0000, 0x5500_0000_1000, 0x1000, "/srv/server\x1b", 2)


def code(*maps: Mapping) -> Code:
    made = Code(0, Path("/nonexistent"))
    made.maps = Maps(maps)
    return made


def test_frames_end_where_there_is_no_code() -> None:
    c = code(LIBC, PROGRAM)
    inside = [PROGRAM.start, LIBC.end - 1]
    assert c.true_part([*inside, 0x1234, LIBC.start]) == inside
    assert c.true_part([LIBC.end]) == []
    assert code().true_part(inside) == []


def test_only_code_counts(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "maps").write_text(
        "1000-2000 r--p 00000000 08:01 5 /a\n2000-3000 r-xp 00001000 08:01 5 /a b\n4000-5000 r-xp 00000000 00:00 0\n"
    )
    c = Code(7, tmp_path)
    assert c.maps.all == [Mapping(0x2000, 0x3000, 0x1000, "/a b", 5), Mapping(0x4000, 0x5000, 0, "")]
    assert [c.holds(a) for a in (0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x4800)] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("frames", "stack"),
    [
        ([0xF, 0x3, 0x4], [0xC, 0x3, 0x4]),  # frame pointers skip the caller
        ([0xF, 0xC, 0x3], [0xC, 0x3]),  # newer kernels do not
        ([0xF], [0xC]),
        ([], [0xC]),
    ],
)
def test_the_caller_is_part_of_the_stack_once(frames: list[int], stack: list[int]) -> None:
    assert stacks.of_call(0xC, frames) == stack


WITHOUT_BCC = (
    "from whyspan.code import bcclib, symboliser; bcclib.LIBRARY = 'libnone.so.0'; symboliser.main()"
)


def test_without_bcc_there_are_modules_and_offsets() -> None:
    names = stacks.name(
        os.getpid(),
        code(LIBC, PROGRAM),
        [LIBC.start + 0x10, PROGRAM.start + 1, 5],
        command=[sys.executable, "-c", WITHOUT_BCC],
    )
    assert names.by == "maps"
    assert names.stack([LIBC.start + 0x10, PROGRAM.start + 1, 5]) == [
        "libc.so.6+0x26010",
        "server\\x1b+0x1001",
        "0x5",
    ]


def test_own_functions_have_names() -> None:
    import ctypes

    address = ctypes.cast(ctypes.CDLL(None).mallopt, ctypes.c_void_p).value
    assert address is not None
    names = stacks.name(os.getpid(), Code(os.getpid()), [address + 8], syscalls=[0, 202])
    if names.by != "bcc":
        pytest.skip("libbcc is not installed")
    assert "mallopt [libc.so.6]" in names.stack([address + 8])[0]
    assert names.syscalls == {0: "read", 202: "futex"}


def answers(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.stdin.read(); print({text!r}); sys.exit({status})"]


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("", "none: "),
        ("{}", "none: "),
        ("[]", "none: "),
        ('{"by": 3}', "none: "),
        ('{"by": "bcc"}', "bcc, in part: "),
        ('{"by": "bcc"}\n{"module": 0, "ranges": 3}', "bcc, in part: "),
        ('{"by": "bcc"}\n{"kernel": {"x": "y"}}', "bcc, in part: "),
    ],
)
def test_an_answer_that_is_none_leaves_addresses(text: str, by: str) -> None:
    names = stacks.name(0, code(LIBC), [LIBC.start + 9, 0xABC], command=answers(text))
    assert names.by.startswith(by)
    assert names.stack([LIBC.start + 9, 0xABC]) == ["libc.so.6+0x26009", "0xabc"]


def test_names_are_clean_and_bounded() -> None:
    long = "std::map<" * 1000
    line = {"module": 0, "ranges": [[0x26000, 0x26010, "\x1b[2J"], [0x26010, 0x26020, long]]}
    first, second = LIBC.start + 2, LIBC.start + 0x12
    names = stacks.name(
        0,
        code(LIBC),
        [first, second],
        command=answers(f'{{"by": "bcc"}}\n{json.dumps(line)}\n{{"end": true}}'),
    )
    assert (names.by, names.user[first]) == ("bcc", "\\x1b[2J [libc.so.6]")
    assert len(names.user[second]) <= 160 + len(" [libc.so.6]")


def test_what_a_sleep_was_for() -> None:
    frames = ["bpf_prog_1", "__traceiter_sched_switch", "__schedule", "schedule", "futex_do_wait", "do_futex"]
    assert stacks.waits_in(frames) == "futex_do_wait"
    assert stacks.waits_in(["__schedule", "schedule_hrtimeout_range", "ep_poll"]) == "ep_poll"
    assert stacks.waits_in([]) == ""


def test_libc_of_this_process_is_found() -> None:
    found = {a.name: a for a in allocators.find(os.getpid()).allocators}
    names = {f.symbol: f for f in found["glibc"].functions}
    assert {"malloc", "calloc", "realloc", "free", "posix_memalign"} <= names.keys()
    assert names["calloc"].size is Size.PRODUCT
    assert len({f.offset for f in names.values()}) == len(names)
    assert not any(f.throws for f in names.values())


def test_a_process_that_is_gone_has_none() -> None:
    assert allocators.find(4_194_304).allocators == ()
    assert allocators.find(4_194_304).notes == ("the process has ended",)


@pytest.mark.parametrize(
    ("first", "stepped"),
    [
        (b"\x55\x48", False),  # push %rbp
        (b"\x41\x54", False),  # push %r12
        (b"\xe9\x00", False),  # jmp
        (b"\x0f\x84", False),  # je
        (b"\x90\x90", False),
        (b"\x48\x85", True),  # test %rdi,%rdi
        (b"\xf3\x0f", True),  # endbr64
        (b"\x41\x89", True),
        (b"", True),
    ],
)
def test_which_instructions_are_stepped_over(first: bytes, stepped: bool) -> None:
    assert allocators.is_stepped(first) is stepped
