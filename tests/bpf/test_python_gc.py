"""Long garbage collections: by an interpreter's USDT notes, by its symbols, or said not to be seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whyspan_probes import features, safety, usdt, user_hooks
from whyspan_probes.registry import Found
from whyspan_probes.state import FileState

from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf

MANY = 7  # full collections
GC_CHILD = Path(__file__).with_name("gc_child.py")
NOTES = {"python:gc__start", "python:gc__done"}


def interpreters() -> list[Path]:
    """Pythons of 3.10 and later on this machine."""
    found = [Path(f"/usr/bin/python3.{n}") for n in range(10, 20)]
    found += sorted(Path.home().glob(".pyenv/versions/3.1[0-9]*/bin/python3.1[0-9]"))
    return [p for p in found if p.exists()]


def notes_of(path: Path) -> list[usdt.Note]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return usdt.find(fd, NOTES)
    finally:
        os.close(fd)


WITH_NOTES = next((p for p in interpreters() if notes_of(p)), None)
WITHOUT = [p for p in interpreters() if not notes_of(p)]
needs_notes = pytest.mark.skipif(WITH_NOTES is None, reason="no interpreter with USDT notes")
needs_symbols = pytest.mark.skipif(not WITHOUT, reason="no interpreter without USDT notes")


class Collector:
    """An interpreter that collects when it is told."""

    def __init__(self, python: Path, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, str(python), "-I", str(GC_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.tid = self.answer()

    def answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def collect(self, generation: int) -> int:
        """Let it collect a generation; return how long that took, ns."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{generation}\n")
        self.process.stdin.flush()
        return self.answer()

    def semaphore(self, note: usdt.Note, path: Path) -> int:
        """Return the counter of a note in its memory."""
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            fields = line.split(None, 5)
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            at = int(fields[2], 16)
            if fields[-1] == str(path) and at <= note.semaphore < at + end - begin:
                with open(f"/proc/{self.pid}/mem", "rb") as f:
                    f.seek(begin + note.semaphore - at)
                    return int.from_bytes(f.read(2), "little")
        raise AssertionError("its semaphore is not mapped")


@pytest.fixture
def start() -> Iterator[Callable[..., Collector]]:
    started: list[Collector] = []

    def begin(python: Path, *prefix: str) -> Collector:
        started.append(Collector(python, *prefix))
        return started[-1]

    yield begin
    for c in started:
        c.process.kill()
        c.process.communicate()


@pytest.fixture
def w(probes: dict[str, Found]) -> Iterator[Watcher]:
    watcher = Watcher([probes["python_gc"]])
    yield watcher
    watcher.close()


def files(w: Watcher) -> dict[str, FileState]:
    return {f.hook: f for f in w.states["python_gc"].files}


def follow(w: Watcher, *tgids: int, now_s: float = 1.0) -> None:
    w.watch(*tgids)
    w.session.follow(tgids, now_s)


@needs_notes
def test_by_notes_with_their_semaphores(w: Watcher, start: Callable[..., Collector]) -> None:
    assert WITH_NOTES is not None
    python = WITH_NOTES.resolve()
    c = start(python)
    notes = notes_of(python)
    assert {n.name for n in notes} == NOTES
    assert [c.semaphore(n, python) for n in notes] == [0] * len(notes)
    follow(w, c.pid)
    assert {h: f.state for h, f in files(w).items()} == {"notes": "attached"}  # not by its symbols besides
    assert set(files(w)["notes"].symbols) == NOTES
    assert [c.semaphore(n, python) for n in notes] == [1] * len(notes)
    took = [c.collect(2) for _ in range(MANY)]
    c.collect(0)  # of nothing: too short to be told
    pauses = w.rows("gc_pause")
    assert pauses["aux"].tolist() == [2] * MANY
    assert (pauses["tid"] == c.tid).all()
    assert (pauses["collected"] >= 0).all()
    for pause, ns in zip(pauses, took, strict=True):
        assert 0 < int(pause["ts_ns"]) - int(pause["begin_ns"]) <= ns
    assert w.count("gc_start") == 0
    w.session.follow((), 2.0)
    assert [c.semaphore(n, python) for n in notes] == [0] * len(notes)
    c.collect(2)
    assert w.count("gc_pause") == MANY


@needs_notes
def test_a_process_that_nobody_watches_is_turned_away(w: Watcher, start: Callable[..., Collector]) -> None:
    assert WITH_NOTES is not None
    ours, other = start(WITH_NOTES), start(WITH_NOTES)
    follow(w, ours.pid)
    for _ in range(MANY):
        other.collect(2)
    ours.collect(2)
    assert w.rows("gc_pause")["tid"].tolist() == [ours.tid]


@needs_symbols
@pytest.mark.parametrize("python", WITHOUT, ids=lambda p: p.name)
def test_by_symbols(python: Path, w: Watcher, start: Callable[..., Collector]) -> None:
    c = start(python)
    follow(w, c.pid)
    states = files(w)
    assert {h: f.state for h, f in states.items()} == {"collect": "attached", "collect_end": "attached"}
    assert len(states["collect"].symbols) == 1  # one calls the other
    assert (
        w.states["python_gc"].state == "attached"
    )  # its launcher has no collector, and that is nothing to report
    took = [c.collect(2) for _ in range(MANY)]
    pauses = w.rows("gc_pause")
    assert pauses["aux"].tolist() == [2] * MANY
    for pause, ns in zip(pauses, took, strict=True):
        assert 0 < int(pause["ts_ns"]) - int(pause["begin_ns"]) <= ns


@needs_symbols
def test_without_return_probes_ends_are_inferred(
    w: Watcher, start: Callable[..., Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        user_hooks, "refuse_user_probe", lambda section, *_, **__: "no" * section.startswith("uretprobe")
    )
    c = start(WITHOUT[-1])
    follow(w, c.pid)
    assert {h: f.state for h, f in files(w).items()} == {"collect": "attached", "collect_end": "refused"}
    for _ in range(MANY):
        c.collect(2)
    starts, pauses = w.rows("gc_start"), w.rows("gc_pause")
    assert starts["aux"].tolist() == [2] * MANY
    # Each but the last ended, at the latest, when the next began.
    assert pauses["aux"].tolist() == [2 | 0x100] * (MANY - 1)
    assert pauses["begin_ns"].tolist() == starts["ts_ns"][:-1].tolist()
    assert pauses["ts_ns"].tolist() == starts["ts_ns"][1:].tolist()


@needs_symbols
def test_a_process_that_moves_stacks_gets_no_return_probe(
    w: Watcher, start: Callable[..., Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safety, "_MOVERS", re.compile(r"/libc\.so"))
    c = start(WITHOUT[-1])
    follow(w, c.pid)
    assert "moves stacks about" in files(w)["collect_end"].reason


@needs_notes
def test_an_interpreter_without_either_is_a_state(
    w: Watcher, start: Callable[..., Collector], tmp_path: Path
) -> None:
    assert WITH_NOTES is not None
    bare = tmp_path / WITH_NOTES.name
    shutil.copy(WITH_NOTES.resolve(), bare)
    subprocess.run(["objcopy", "-R", ".note.stapsdt", str(bare)], check=True)
    c = start(bare)
    follow(w, c.pid)
    (file,) = w.states["python_gc"].files
    assert (file.hook, file.state) == ("collect", "absent")
    assert file.reason.startswith("it has no function gc_collect_main")
    assert w.states["python_gc"].state == "failed"
    c.collect(2)
    assert w.count("gc_pause") == 0


@needs_notes
def test_without_multi_links_it_attaches_by_perf(
    probes: dict[str, Found], start: Callable[..., Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WITH_NOTES is not None
    missing = features.HookTable.missing
    monkeypatch.setattr(
        features.HookTable, "missing", lambda self, s: "too old" if s.endswith(".multi") else missing(self, s)
    )
    watcher = Watcher([probes["python_gc"]])
    try:
        c = start(WITH_NOTES)
        follow(watcher, c.pid)
        assert files(watcher)["notes"].by == "uprobe"
        for _ in range(MANY):
            c.collect(2)
        assert watcher.rows("gc_pause")["aux"].tolist() == [2] * MANY
    finally:
        watcher.close()
