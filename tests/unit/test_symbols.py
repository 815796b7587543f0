"""Symbols of ELF files: where the linker put them, and nothing but an error from bytes that are no such file."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from whyspan_probes import symbols
from whyspan_probes.symbols import ElfError, find, named

SOURCE = """
#include <stdlib.h>
__attribute__((visibility("default"))) int hooked(int n) { return n + 1; }
__attribute__((visibility("default"))) int also_hooked(int n) { return n + 2; }
int static_like(int n) { return n + 3; }
__attribute__((visibility("default"), section(".probes"))) volatile unsigned short raised = 1;
__attribute__((visibility("default"))) volatile unsigned short in_bss;
__attribute__((visibility("default"))) void *uses(void) { return malloc(3); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("elf") / "libthing.so"
    subprocess.run(
        ["cc", "-x", "c", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-o", str(path), "-"],
        input=SOURCE.encode(),
        check=True,
    )
    return path


def look(path: Path, *names: str) -> dict[str, symbols.Symbol]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return find(fd, names)
    finally:
        os.close(fd)


def test_offsets_are_those_of_the_bytes_in_memory(library: Path) -> None:
    found = look(library, "hooked", "also_hooked", "static_like", "raised", "in_bss", "nothing", "malloc")
    # Not in .bss, which is not in the file; not what is only used.
    assert set(found) == {"hooked", "also_hooked", "static_like", "raised"}
    assert (found["raised"].size, found["raised"].function) == (2, False)
    assert all(found[n].function for n in ("hooked", "also_hooked", "static_like"))
    data, loaded = library.read_bytes(), ctypes.CDLL(str(library))
    for name in ("hooked", "also_hooked"):
        address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
        assert address is not None
        at, size = found[name].offset, found[name].size
        assert data[at : at + size] == ctypes.string_at(address, size)
    assert data[found["raised"].offset : found["raised"].offset + 2] == b"\1\0"


def test_a_stripped_file_keeps_what_it_exports(library: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", str(stripped), str(library)], check=True)
    before, after = (look(p, "hooked", "also_hooked", "static_like") for p in (library, stripped))
    assert set(before) - set(after) == {"static_like"}
    assert {n: s.size for n, s in after.items()} == {n: before[n].size for n in after}


def test_names_used_and_defined(library: Path) -> None:
    fd = os.open(library, os.O_RDONLY)
    try:
        assert named(fd, ["malloc", "hooked", "raised", "free", "static_like"]) == {
            "malloc",
            "hooked",
            "raised",
        }
    finally:
        os.close(fd)


def test_another_architecture_is_refused(library: Path) -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    fd = os.open(library, os.O_RDONLY)
    try:
        with pytest.raises(ElfError, match="another architecture"):
            find(fd, ["hooked"], machine=other)
        with pytest.raises(ElfError, match="another architecture"):
            find(fd, ["hooked"], machine="pdp11")
    finally:
        os.close(fd)


def test_no_elf_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content in (b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(ElfError):
            look(path, "hooked")


def test_damaged_files_raise_nothing_else(library: Path, tmp_path: Path) -> None:
    whole, path, dice = library.read_bytes(), tmp_path / "damaged.so", random.Random(7)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(401):
        data = bytearray(whole)
        # Headers first of all: at the start of the file and, of sections, at its end.
        for _ in range(dice.randrange(1, 9)):
            where = dice.choice([dice.randrange(16, 64), dice.randrange(64, 700), -dice.randrange(1, 2200)])
            data[where] = dice.randrange(256)
        if not dice.randrange(5):
            del data[dice.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            look(path, "hooked", "raised")
            outcomes["read"] += 1
        except ElfError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50


def test_a_table_that_claims_to_be_huge_is_not_read(library: Path, tmp_path: Path) -> None:
    data = bytearray(library.read_bytes())
    sections = int.from_bytes(data[40:48], "little")
    for i in range(int.from_bytes(data[60:62], "little")):
        at = sections + i * 64
        if int.from_bytes(data[at + 4 : at + 8], "little") == 11:
            data[at + 32 : at + 40] = (1 << 40).to_bytes(8, "little")
    path = tmp_path / "huge.so"
    path.write_bytes(data)
    with pytest.raises(ElfError, match="too large"):
        look(path, "hooked")
