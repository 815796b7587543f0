"""Which files watched processes map: looked at when it is due and only when something may have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from whyspan_probes import libraries
from whyspan_probes.libraries import Library, State, mapped
from whyspan_probes.mapped_files import MappedFiles, key_of

GONE = 2**22 + 17  # above the greatest possible pid
LIBRARY = next(Path(f.path) for f in mapped(os.getpid()).files if "/libz." in f.path or "/libm." in f.path)
#: Loads a library for each line, and answers.
LOADS = """
import ctypes, sys
print(flush=True)
for line in sys.stdin:
    ctypes.CDLL(line.strip())
    print(flush=True)
"""
PATTERN = r"/libthing[^/]*\.so$"

Start = Callable[[], "Loader"]


class Loader:
    """A process that maps what it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.tgid = self.process.pid
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "\n"

    def load(self, path: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        self._answer()


@pytest.fixture
def start() -> Iterator[Start]:
    loaders: list[Loader] = []

    def run() -> Loader:
        loaders.append(Loader())
        return loaders[-1]

    yield run
    for loader in loaders:
        loader.process.kill()
        loader.process.communicate()


@pytest.fixture
def thing(tmp_path: Path) -> Path:
    return Path(shutil.copy(LIBRARY, tmp_path / "libthing.so"))


def test_a_library_is_seen_when_the_next_look_is_due(start: Start, thing: Path) -> None:
    loader = start()
    files = MappedFiles([PATTERN])
    assert not files.follow([loader.tgid], 1.0)
    loader.load(thing)
    assert not files.follow([loader.tgid], 1.2)  # soon after the first look, but not at once
    assert files.follow([loader.tgid], 1.3)
    (file,) = files.files.values()
    assert (file.path, list(file.processes), file.problem) == (str(thing), [loader.tgid], "")
    assert not files.follow([loader.tgid], 100.0)
    assert files.follow([], 100.1)
    assert files.files == {}


def test_looks_become_rarer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = start()
    files = MappedFiles([PATTERN])
    looks: list[float] = []
    now = 0.0
    monkeypatch.setattr(MappedFiles, "_look", lambda *_: looks.__iadd__([now]) is None)
    while now < 40:
        files.follow([loader.tgid], now)
        now = round(now + 0.05, 2)
    gaps = [round(b - a, 2) for a, b in pairwise(looks)]
    assert gaps[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(gaps[6:]) == {5.0}


def test_what_still_maps_code_is_looked_at_soon_again(start: Start, thing: Path, tmp_path: Path) -> None:
    loader = start()
    other = Path(shutil.copy(LIBRARY, tmp_path / "libthing2.so"))
    files = MappedFiles([PATTERN])
    for now_s in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        files.follow([loader.tgid], now_s)  # five seconds apart by now
    loader.load(thing)
    assert files.follow([loader.tgid], 55.0)
    loader.load(other)
    assert files.follow([loader.tgid], 55.3)


def test_mappings_are_read_only_when_code_was_mapped(
    start: Start, thing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = start()
    files = MappedFiles([PATTERN])
    reads: list[int] = []
    find = libraries.find

    def counted(tgid: int, *args: object) -> list[Library]:
        reads.append(tgid)
        return find(tgid, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(libraries, "find", counted)
    for now_s in (0.0, 10.0, 20.0, 30.0):
        files.follow([loader.tgid], now_s)
    assert len(reads) == 1
    loader.load(thing)
    for now_s in (40.0, 50.0):
        files.follow([loader.tgid], now_s)
    assert len(reads) == 2
    files.follow([loader.tgid], 105.0)  # after a minute whatever the size
    assert len(reads) == 3
    files.again(loader.tgid)
    files.follow([loader.tgid], 105.1)
    assert len(reads) == 4


def test_one_file_of_two_processes_is_one(start: Start, thing: Path, tmp_path: Path) -> None:
    a, b = start(), start()
    other = Path(shutil.copy(LIBRARY, tmp_path / "libthing2.so"))  # the same bytes, another file
    for loader in (a, b):
        loader.load(thing)
    b.load(other)
    files = MappedFiles([PATTERN])
    files.follow([a.tgid, b.tgid], 1.0)
    assert {f.path: sorted(f.processes) for f in files.files.values()} == {
        str(thing): sorted([a.tgid, b.tgid]),
        str(other): [b.tgid],
    }
    files.follow([b.tgid], 1.1)
    assert {f.path: sorted(f.processes) for f in files.files.values()} == {
        str(thing): [b.tgid],
        str(other): [b.tgid],
    }


def test_a_process_that_is_gone_and_one_that_never_was(start: Start, thing: Path) -> None:
    loader = start()
    loader.load(thing)
    files = MappedFiles([PATTERN])
    assert files.follow([loader.tgid, GONE], 1.0)
    loader.process.kill()
    loader.process.wait()
    assert files.follow([loader.tgid, GONE], 2.0)
    assert files.files == {}


def test_no_pattern_matches_nothing(start: Start, thing: Path) -> None:
    loader = start()
    loader.load(thing)
    assert not MappedFiles([]).follow([loader.tgid], 1.0)


def test_a_storm_of_processes_is_looked_at_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(_: object, tgid: int, *__: object) -> bool:
        looks.append(tgid)
        return False

    monkeypatch.setattr(MappedFiles, "_look", look)
    files = MappedFiles([PATTERN])
    tgids = list(range(GONE, GONE + 1000))
    files.follow(tgids, 1.0)
    assert len(looks) < 100
    now_s = 1.0
    while set(looks) != set(tgids) and now_s < 100.0:
        now_s += 0.1
        files.follow(tgids, now_s)
    assert set(looks) == set(tgids)


def test_what_cannot_be_had_is_told_by_path_and_reason() -> None:
    library = Library(7, "/a/b", 0, 0, False, "", "", State.MISSING)
    assert key_of(library) == ("", "/a/b", State.MISSING.value)
