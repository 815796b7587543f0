"""The symboliser: which symbol holds an address, perf maps, files that are others, and what it says of them."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.code import bcclib, perfmap, symbolise, symboliser, unwindtable
from whyspan.code.asked import Module, Question
from whyspan.code.bcclib import Collected
from whyspan.code.files import identify
from whyspan.code.names import Range


def collected(wanted: list[int], *symbols: tuple[str, int, int]) -> list[tuple[int, int, int, bytes]]:
    import ctypes

    found = Collected(wanted)
    for name, start, size in symbols:
        buffer = ctypes.create_string_buffer(name.encode())
        assert found.add(ctypes.addressof(buffer), start, size) == 0
    return list(found.ranges())


def test_the_symbol_that_holds_an_address() -> None:
    assert collected([105, 95, 150, 250], ("b", 200, 10), ("a", 100, 20)) == [
        (95, 0, 100, b""),
        (105, 100, 120, b"a"),
        (150, 120, 200, b""),
        (250, 210, 1 << 63, b""),
    ]


def test_of_several_names_the_plainest_and_of_nested_ones_the_inner() -> None:
    assert collected([5], ("__open64", 0, 10), ("_open", 0, 10), ("open64", 0, 10), ("open", 0, 10)) == [
        (5, 0, 10, b"open")
    ]
    assert collected([2, 5, 8], ("outer", 0, 10), ("inner", 4, 3)) == [
        (2, 0, 4, b"outer"),
        (5, 4, 7, b"inner"),
        (8, 7, 10, b"outer"),
    ]


def test_a_symbol_without_size_names_nothing_and_ends_what_is_known() -> None:
    assert collected([5, 15], ("label", 10, 0)) == [(5, 0, 10, b""), (15, 10, 1 << 63, b"")]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), max_size=12),
)
def test_every_address_of_a_range_has_its_answer(wanted: list[int], symbols: list[tuple[int, int]]) -> None:
    named = [(f"f{start}", start, size) for start, size in symbols]

    def truth(at: int) -> int:
        return max((start for start, size in symbols if start <= at < start + size), default=-1)

    for at, start, end, _ in collected(wanted, *named):
        assert start <= at < end
        assert {truth(a) for a in range(start, min(end, 70))} == {truth(at)}


def test_too_many_symbols_end_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcclib, "_MAX_SYMBOLS", 2)
    found = Collected([1])
    assert [found.add(None, 0, 1), found.add(None, 0, 1), found.add(None, 0, 1)] == [0, 0, -1]


def perf(text: bytes, *wanted: int) -> list[tuple[int, int, str]]:
    return perfmap.in_map(io.BytesIO(text), list(wanted))


def test_the_last_entry_of_a_perf_map_holds() -> None:
    text = b"10 10 old\n0x30 8 with blanks (a.js:1)\n10 10 new\n"
    assert perf(text, 0x15, 0x1F, 0x20, 0x30) == [(0x10, 0x20, "new"), (0x30, 0x38, "with blanks (a.js:1)")]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"10",
        b"10 10",
        b"zz 10 f",
        b"10 zz f",
        b"-10 100 f",
        b"10 -5 f",
        b"10 0 f",
        b"10 ffffffffff f",
        b"ffffffffffffffffff 10 f",
        b"10 10 " + b"x" * 5000 + b" 10 10 y",  # longer than any line is read; its rest is none
        b"\xff\xfe\x00",
    ],
)
def test_lines_of_a_perf_map_that_are_none(line: bytes) -> None:
    assert [name[:1] for _, _, name in perf(line + b"\n15 1 good\n", 0x15)] == ["g"]


def test_a_perf_map_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfmap, "MAX_BYTES", 1000)
    assert perf(b"1 1 x\n" * 400 + b"10 10 late\n", 0x10) == []


@pytest.fixture
def own_map() -> Iterator[Path]:
    path = Path(f"/tmp/perf-{os.getpid()}.map")
    yield path
    path.unlink(missing_ok=True)


def test_a_perf_map_is_the_processs_own(own_map: Path, tmp_path: Path) -> None:
    def ask() -> list[tuple[int, int, str]]:
        return perfmap.of_process(os.getpid(), [0x15])

    with pytest.raises(OSError):
        ask()
    own_map.write_text("10 10 f\n")
    assert ask() == [(0x10, 0x20, "f")]
    os.utime(own_map, (1, 1))
    with pytest.raises(OSError, match="earlier process"):
        ask()
    own_map.unlink()
    (tmp_path / "map").write_text("10 10 f\n")
    own_map.symlink_to(tmp_path / "map")
    with pytest.raises(OSError):
        ask()
    own_map.unlink()
    os.mkfifo(own_map)
    with pytest.raises(OSError, match="regular"):
        ask()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_perf_map_of_another_user_is_not_read(own_map: Path) -> None:
    own_map.write_text("10 10 f\n")
    os.chown(own_map, 12345, 12345)
    with pytest.raises(OSError, match="somebody else"):
        perfmap.of_process(os.getpid(), [0x15])


# Files


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elf")
    source = """
namespace lab { struct S { int f(const char *, int); }; int S::f(const char *p, int n) { return p[n]; } }
static __attribute__((noinline)) int hidden(int x) { return x * 3; }
extern "C" int plain(int x) { return hidden(x) + 1; }
asm(".text\\n.globl _RNvCs1234_7mycrate3foo\\n.type _RNvCs1234_7mycrate3foo,@function\\n"
    "_RNvCs1234_7mycrate3foo: ret\\n.size _RNvCs1234_7mycrate3foo,.-_RNvCs1234_7mycrate3foo\\n");
"""
    (folder / "a.cpp").write_text(source)
    out = folder / "liba.so"
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-Wl,--build-id", "-o", out, folder / "a.cpp"], check=True
    )
    return out


def symbols_of(path: Path) -> dict[str, int]:
    out = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    return {line.split()[2]: int(line.split()[0], 16) for line in out.splitlines() if len(line.split()) == 3}


def module(path: Path, *offsets: int) -> Module:
    """As if this process mapped it: found by its path."""
    return Module(
        path=str(path), holders=[(os.getpid(), "0-1")], id=identify(str(path)), offsets=list(offsets)
    )


def asked(*modules: Module) -> symbolise.Answer:
    answer = symbolise.ask(Question(modules=list(modules)))
    if answer.by == "maps":
        pytest.skip(answer.why)
    return answer


def test_functions_are_named_and_demangled(library: Path) -> None:
    at = symbols_of(library)
    names = ["_ZN3lab1S1fEPKci", "plain", "_ZL6hiddeni", "_RNvCs1234_7mycrate3foo"]
    answer = asked(module(library, *(at[n] for n in names)))
    assert (answer.by, answer.whole) == ("bcc", True)
    found = {r.start: r.name for r in answer.modules[0]}
    # In a small library offsets are addresses.
    assert [found[at[n]] for n in names[:3]] == ["lab::S::f", "plain", "hidden"]
    assert found[at[names[3]]] in ("mycrate::foo", names[3])  # where LLVM is that knows them


def test_a_stripped_library_tells_where_functions_begin(library: Path, tmp_path: Path) -> None:
    at = symbols_of(library)
    stripped = tmp_path / "liba.so"
    subprocess.run(["strip", "-o", stripped, library], check=True)
    hidden = at["_ZL6hiddeni"]
    answer = asked(module(stripped, at["plain"] + 1, hidden + 1, hidden + 2))
    found = {r.name for r in answer.modules[0]}
    assert found == {"plain", f"+0x{hidden:x}"}


def test_a_file_that_has_changed_is_not_read(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "liba.so"
    shutil.copy(library, copy)
    was = module(copy, symbols_of(library)["plain"])
    os.utime(copy)
    answer = asked(was, module(library, symbols_of(library)["plain"]))
    assert answer.modules[0] == []
    assert answer.modules[1][0].name == "plain"


def test_what_is_no_library_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("#!/bin/sh\n")
    (tmp_path / "cut").write_bytes(b"\x7fELF\x02\x01\x01" + b"\xff" * 200)
    os.mkfifo(tmp_path / "pipe")
    modules = [module(tmp_path / name, 5) for name in ("text", "cut", "pipe", "missing")]
    answer = asked(*modules)
    assert answer.whole
    assert not any(r.name for found in answer.modules.values() for r in found)


@pytest.mark.parametrize("length", [64, 100, 500, 3000])
def test_a_library_that_is_cut_off_or_damaged(library: Path, tmp_path: Path, length: int) -> None:
    data = library.read_bytes()
    (tmp_path / "cut").write_bytes(data[:length])
    broken = bytearray(data)
    broken[length : length + 40] = b"\xff" * 40
    (tmp_path / "broken").write_bytes(broken)
    for name in ("cut", "broken"):
        fd = os.open(tmp_path / name, os.O_RDONLY)
        with contextlib.suppress(OSError, OverflowError):
            assert list(unwindtable.function_starts(fd)) == sorted(unwindtable.function_starts(fd))
        os.close(fd)
    good = module(library, symbols_of(library)["plain"])
    answer = asked(module(tmp_path / "cut", 0x1100), module(tmp_path / "broken", 0x1100), good)
    assert 2 in answer.modules or not answer.whole


def test_the_vdso_has_names() -> None:
    answer = asked(Module(path="[vdso]", vdso=True, offsets=list(range(0, 8192, 64))))
    assert any("clock_gettime" in r.name for r in answer.modules[0])


def test_a_table_for_unwinding_that_claims_too_much(tmp_path: Path) -> None:
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, 1)
    segment = struct.pack("<IIQQQQQQ", 0x6474E550, 4, 120, 0x1000, 0, 28, 28, 8)
    table = b"\x01\x1b\x03\x3b" + struct.pack("<iI", 0, 0xFFFFFFFF) + struct.pack("<iiii", 32, 0, 16, 0)
    path = tmp_path / "a"
    path.write_bytes(bytes(head) + segment + table)
    fd = os.open(path, os.O_RDONLY)
    assert list(unwindtable.function_starts(fd)) == [0x1010, 0x1020]
    os.close(fd)


# The program


WITHOUT_BCC = [
    *(sys.executable, "-c"),
    "from whyspan.code import bcclib, symboliser; bcclib.LIBRARY = 'libnone.so.0'; symboliser.main()",
]
ENDLESS = """
import sys
from whyspan.code import symboliser
def write(_):
    while True: sys.stdout.write("x" * 65536)
symboliser._files = write
symboliser.main()
"""


def test_without_bcc_perf_maps_are_read_all_the_same(own_map: Path) -> None:
    own_map.write_text("10 10 f\n")
    question = Question(
        modules=[module(Path(sys.executable), 5)], made=[(os.getpid(), [0x15]), (2**22 - 1, [5])]
    )
    answer = symbolise.ask(question, WITHOUT_BCC)
    assert (answer.by, answer.whole) == ("maps", True)
    assert "libnone.so.0" in answer.why
    assert answer.made == {os.getpid(): [Range(0x10, 0x20, "f")], 2**22 - 1: []}


def test_it_ends_with_whoever_asked() -> None:
    answer = symbolise.ask(Question(parent=1))
    assert (answer.by, answer.whole) == ("", False)


def test_its_answer_is_bounded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as f:
        done = subprocess.run(
            [sys.executable, "-c", ENDLESS], input=b"{}", stdout=f, stderr=subprocess.DEVNULL, check=False
        )
    assert done.returncode != 0
    assert out.stat().st_size == symboliser._ANSWER


def command(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.stdin.read(); print({text!r}); sys.exit({status})"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "x",
        '{"by": 3}',
        '{"module": "x"}',
        '{"module": 0, "ranges": [[1]]}',
        "\x00\xff",
    ],
)
def test_an_answer_that_is_none(text: str) -> None:
    answer = symbolise.ask(Question(), command(text))
    assert (answer.by, answer.modules, answer.whole) == ("", {}, False)
    assert answer.why


def test_names_in_an_answer_are_cleaned_and_bounded() -> None:
    line = (
        '{"module": 0, "ranges": [[1, 5, "a\\u001b[31m\\u202e"], [6, 9, "'
        + "y" * 3000
        + '"], [9, 3, "z"], [-5, 2, "z"]]}'
    )
    answer = symbolise.ask(Question(), command('{"by": "bcc"}\n' + line + '\n{"end": true}'))
    assert answer.whole
    assert [(r.start, r.end, len(r.name)) for r in answer.modules[0]] == [(1, 5, 15), (6, 9, 160)]
    assert answer.modules[0][0].name == "a\\x1b[31m\\u202e"


def heard(asker: symbolise.Asker, now_s: float = 0.0) -> symbolise.Answer:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        answer = asker.poll(now_s)
        if answer is not None:
            return answer
        time.sleep(0.005)
    raise AssertionError("no answer")


def test_asked_without_waiting() -> None:
    asker = symbolise.Asker()
    assert asker.poll(0.0) is None and not asker.tgid
    before = len(os.listdir("/proc/self/fd"))
    asker.ask(Question(made=[(2**22 - 1, [5])]), 0.0)
    assert asker.tgid > 0
    answer = heard(asker)
    assert answer.whole and answer.cpu_s > 0
    assert not asker.tgid and len(os.listdir("/proc/self/fd")) == before


def test_one_that_hangs_is_ended() -> None:
    asker = symbolise.Asker([sys.executable, "-c", "import time; time.sleep(1000)"])
    asker.ask(Question(), 0.0)
    assert asker.poll(symbolise.TIMEOUT_S - 1) is None
    answer = heard(asker, symbolise.TIMEOUT_S)
    assert (answer.by, answer.why) == ("", "the symboliser ended with signal 9")
    asker.ask(Question(), 0.0)
    tgid = asker.tgid
    asker.close()
    assert not Path(f"/proc/{tgid}").exists()
    asker.close()


def test_one_that_cannot_be_started_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    asker = symbolise.Asker(["/nonexistent"])
    with pytest.raises(OSError):
        asker.ask(Question(), 0.0)
    assert len(os.listdir("/proc/self/fd")) == before and not asker.tgid
