"""Native frames of stacks: places told at once, names that come later, and what the asking may cost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from whyspan.code import maps, memory, native, places, returns, symbolise
from whyspan.code.asked import Question
from whyspan.code.names import Range
from whyspan.code.native import Native, reaches_beginning
from whyspan.code.places import Places
from whyspan.code.symbolise import Answer, Asker

TGID = 7
MAPS = b"""400000-401000 r-xp 00001000 fe:00 7 /srv/server
500000-501000 r-xp 00000000 fe:00 8 /usr/lib/libc.so.6
600000-601000 rwxp 00000000 00:00 0
700000-701000 r-xp 00000000 00:00 0 [vdso]
"""


class Proc:
    """A process whose mappings a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / str(TGID)).mkdir()
        self.reads = 0
        self.map(MAPS, 1)

    def map(self, text: bytes, size: int) -> None:
        (self.folder / str(TGID) / "maps").write_bytes(text)
        (self.folder / str(TGID) / "status").write_text(f"VmExe: {size} kB\nVmLib: 0 kB\n")

    def end(self) -> None:
        shutil.rmtree(self.folder / str(TGID))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path)
    read = maps.read

    def counted(tgid: int, folder: Path) -> maps.Maps | None:
        made.reads += 1
        return read(tgid, folder)

    def call(tgid: int, pieces: list[tuple[int, int]]) -> list[bytes]:
        # Behind every address but those that end in ff there is a call.
        return [b"" if a + returns.BYTES & 0xFF == 0xFF else b"\0\0\xe8\0\0\0\0" for a, _ in pieces]

    monkeypatch.setattr(maps, "read", counted)
    monkeypatch.setattr(memory, "read", call)
    monkeypatch.setattr(returns, "follows_call", returns.x86_64)
    return made


class FakeAsker(Asker):
    """Answers by a function of the test, at the next poll."""

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        super().__init__()
        self.asked: list[Question] = []
        self._answer_to = answer
        self.ready = True

    @property
    def tgid(self) -> int:
        return int(len(self.asked) > self.heard)

    heard = 0

    def ask(self, question: Question, now_s: float) -> None:
        self.asked.append(question)

    def poll(self, now_s: float) -> Answer | None:
        if not self.tgid or not self.ready:
            return None
        self.heard += 1
        return self._answer_to(self.asked[-1])


def by_page(question: Question) -> Answer:
    """Name every module's functions after it; each is 16 bytes long."""
    return Answer(
        by="bcc",
        whole=True,
        modules={n: [_function(o, m.path[-4:]) for o in m.offsets] for n, m in enumerate(question.modules)},
        made={tgid: [_function(a, "jit") for a in found] for tgid, found in question.made},
        cpu_s=0.1,
    )


def _function(at: int, name: str) -> Range:
    return Range(at & ~15, (at & ~15) + 16, f"{name}_{at & ~15:x}")


class Lab:
    def __init__(self, proc: Proc, answer: Callable[[Question], Answer] = by_page) -> None:
        self.asker = FakeAsker(answer)
        self.native = Native(self.asker, Places(proc.folder))
        self.now_s = 100.0

    def of(self, *user: int, stack: int = 1) -> native.Frames:
        self.native.learn({TGID: [user]}, self.now_s)
        return self.native.of(stack, TGID, user, self.now_s)

    def later(self, s: float = 10.0) -> dict[int, list[str]]:
        self.now_s += s
        self.native.tend(self.now_s)
        return {n: f.texts for n, f in self.native.tend(self.now_s).items()}


def test_a_stack_is_told_at_once_and_again_with_names(proc: Proc) -> None:
    lab = Lab(proc)
    first = lab.of(0x400010, 0x400021, 0x500031)
    assert first.texts == ["server+0x1010", "server+0x1021", "libc.so.6+0x31"]
    assert first.open
    assert lab.later() == {1: ["rver_1010 [server]", "rver_1020 [server]", "so.6_30 [libc.so.6]"]}
    # What else lies in these functions needs no question.
    again = lab.of(0x400015, 0x400025, stack=2)
    assert (again.texts, again.open) == (["rver_1010 [server]", "rver_1020 [server]"], False)
    assert lab.later() == {} and len(lab.asker.asked) == 1


def test_a_call_is_named_and_not_what_comes_after_it(proc: Proc) -> None:
    lab = Lab(proc)
    lab.of(0x400010, 0x400020)
    assert lab.later() == {1: ["rver_1010 [server]", "rver_1010 [server]"]}


@pytest.mark.parametrize(
    ("user", "count"),
    [
        ((0x400010, 0x123), 1),  # no code there
        ((0x400010, 0x4000FF, 0x400010), 1),  # no call in front of it
        ((0x400010, 0x400000 - 8), 1),
        ((0x123, 0x400010), 0),
        ((0x400010, 0), 1),
        ((0x400010, (1 << 64) - 1), 1),
    ],
)
def test_a_stack_ends_where_there_cannot_be_a_frame(proc: Proc, user: tuple[int, ...], count: int) -> None:
    frames = Lab(proc).of(*user)
    assert (len(frames.texts), frames.cut) == (count, True)


def test_without_frames_there_is_nothing_to_ask(proc: Proc) -> None:
    lab = Lab(proc)
    assert lab.of() == ([], True, False)
    lab.later()
    assert lab.asker.asked == [] and proc.reads == 0


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["f [x]", "_start [x]"], True),
        (["f [x]", "main [x]", "__libc_start_call_main [libc.so.6]"], True),
        (["f [x]", "main [x]", "libc.so.6+0x2724a"], True),
        (["f [x]", "libc.so.6+0x2724a"], False),
        (["f [x]", "main [x]"], False),
        (["main [x]", "libother.so+0x5"], False),
        (["f [x]", "start_thread [libc.so.6]"], True),
        (["f [x]", "clone3 [libc.so.6]"], True),
        (["my_start [x]"], False),
        ([], False),
    ],
)
def test_where_a_thread_begins(texts: list[str], whole: bool) -> None:
    assert reaches_beginning(texts) is whole


def test_mappings_are_read_again_only_for_a_reason(proc: Proc) -> None:
    lab = Lab(proc)
    for i in range(20):
        lab.of(0x400010 + i)
    assert proc.reads == 1
    # An address of nowhere: again and again, but ever less often.
    times = []
    for i in range(600):
        lab.now_s += 1
        before = proc.reads
        lab.of(0x400010, 0x123000 + i)
        if proc.reads > before:
            times.append(lab.now_s)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps) and 60 <= gaps[-1] <= 61
    # New code: at the next look, which comes within a second.
    proc.map(MAPS + b"800000-801000 r-xp 0 fe:00 9 /usr/lib/new.so\n", 2)
    lab.now_s += 1
    assert lab.of(0x800010).texts == ["new.so+0x10"]
    # And what is gone is not taken for what was there.
    proc.map(b"800000-801000 r-xp 0 fe:00 10 /usr/lib/other.so\n", 3)
    lab.now_s += 1
    assert lab.of(0x800010).texts == ["other.so+0x10"]


def test_few_lists_are_read_per_batch(proc: Proc) -> None:
    lab = Lab(proc)
    for tgid in range(100, 120):
        shutil.copytree(proc.folder / str(TGID), proc.folder / str(tgid))
    lab.native.learn({tgid: [(0x400010,)] for tgid in range(100, 120)}, lab.now_s)
    assert proc.reads == places._MAX_READS
    assert lab.native.of(1, 119, (0x400010,), lab.now_s) == ([], True, False)


def test_a_process_that_has_ended_keeps_its_places(proc: Proc) -> None:
    lab = Lab(proc)
    lab.of(0x400010)
    proc.end()
    lab.now_s += 5
    assert lab.of(0x400018).texts == ["server+0x1018"]
    lab.native.forget(TGID)
    assert lab.of(0x400018) == ([], True, False)


def test_code_that_a_process_makes_is_asked_for_again(proc: Proc) -> None:
    lab = Lab(proc)
    assert lab.of(0x600010).texts == ["(anonymous)+0x10"]
    assert lab.later() == {1: ["jit_600010 [(anonymous)]"]}
    assert lab.asker.asked[0].made == [(TGID, [0x600010])]
    assert not lab.of(0x600010).open
    lab.now_s += 31
    assert lab.of(0x600010).open
    lab.native.forget(TGID)
    assert lab.of(0x700020).texts == ["[vdso]+0x20"]
    lab.later()
    assert lab.asker.asked[-1].modules[0].vdso


def test_many_places_are_asked_for_soon_and_few_later(proc: Proc) -> None:
    lab = Lab(proc)
    lab.of(0x400010)
    lab.native.tend(lab.now_s)
    assert len(lab.asker.asked) == 1  # nothing was asked before
    lab.native.tend(lab.now_s)
    lab.of(0x400110)
    lab.later(2)
    assert len(lab.asker.asked) == 1
    lab.later(4)
    assert len(lab.asker.asked) == 2
    for i in range(2, 12):
        lab.of(0x400010 + i * 0x100 - i)
    lab.later(1)
    assert len(lab.asker.asked) == 3


def test_asking_takes_no_more_cpu_than_it_may(proc: Proc) -> None:
    def dear(question: Question) -> Answer:
        answer = by_page(question)
        answer.cpu_s = 1.0
        return answer

    lab = Lab(proc, dear)
    for i in range(3600):
        lab.now_s += 1
        lab.native._names.forget(("x", i))
        for j in range(16):
            lab.native._wait(
                places.Place(places.Module(("x", i), maps.Mapping(0, 1, 0, "/x", 1), None, 0), j * 16, "")
            )
        lab.native.tend(lab.now_s)
    allowed = native._BURST_S + 3600 * native._CORE_RATIO
    assert allowed - 2 <= lab.native.cpu_s <= allowed + 1


def test_what_waits_and_what_is_kept_is_bounded(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_MAX_PLACES", 100)
    monkeypatch.setattr(native, "MAX_STACKS", 50)
    lab = Lab(proc)
    lab.asker.ready = False
    for i in range(0x400000, 0x401000, 2):
        lab.of(i, stack=i)
    assert lab.native._waiting_count == 100
    assert len(lab.native._open) == 50
    lab.later()
    assert sum(len(m.offsets) for m in lab.asker.asked[0].modules) == 100
    monkeypatch.setattr(places, "_MAX_ADDRESSES", 10)
    for i in range(0x400000, 0x401000, 2):
        lab.of(i, i)
    (view,) = lab.native._places._views.values()
    assert len(view.leaves) <= 12 and len(view.callers) <= 12


def test_a_file_that_ends_the_symboliser_is_not_asked_about_again(proc: Proc) -> None:
    def dies(question: Question) -> Answer:
        paths = [m.path for m in question.modules]
        if "/srv/server" not in paths:
            return by_page(question)
        done = paths.index("/srv/server")
        answer = by_page(question)
        answer.modules = {n: r for n, r in answer.modules.items() if n < done}
        answer.whole, answer.why = False, "the symboliser ended with signal 11"
        return answer

    lab = Lab(proc, dies)
    lab.of(0x400010, 0x500031)
    lab.later()
    lab.later(60.0)
    assert lab.of(0x400010, 0x500031).texts == ["server+0x1010", "so.6_30 [libc.so.6]"]
    assert lab.of(0x400800).texts == ["server+0x1800"]
    before = len(lab.asker.asked)
    lab.later(600.0)
    assert all("/srv/server" not in [m.path for m in q.modules] for q in lab.asker.asked[1:])
    assert len(lab.asker.asked) == before


def test_without_bcc_there_are_modules_and_offsets_and_a_state(proc: Proc) -> None:
    def none(question: Question) -> Answer:
        answer = by_page(question)
        answer.by, answer.why, answer.modules = "maps", "libbcc.so.0: cannot open shared object file", {}
        return answer

    lab = Lab(proc, none)
    lab.of(0x400010, 0x500031)
    lab.later()
    assert lab.native.state == "libbcc.so.0: cannot open shared object file"
    frames = lab.of(0x400010, 0x500031)
    assert (frames.texts, frames.open) == (["server+0x1010", "libc.so.6+0x31"], False)
    # Code that was made is named all the same; and files are asked about again after a while.
    lab.of(0x600010, stack=5)
    assert lab.later() == {5: ["jit_600010 [(anonymous)]"]}
    assert len(lab.asker.asked) == 2
    lab.now_s += 600
    assert lab.of(0x400010).open


def test_one_that_cannot_be_started_is_a_state(proc: Proc) -> None:
    lab = Lab(proc)
    lab.native = Native(Asker(["/nonexistent"]), Places(proc.folder))
    lab.of(0x400010)
    lab.later()
    assert "cannot be started: No such file" in lab.native.state
    assert lab.of(0x400010).texts == ["server+0x1010"]


def test_names_that_mean_harm_in_paths(proc: Proc) -> None:
    proc.map(b"400000-401000 r-xp 0 fe:00 7 /srv/\xff\x1b[31m" + b"x" * 300 + b"\n", 2)
    lab = Lab(proc)
    (text,) = lab.of(0x400010).texts
    assert text.startswith("\\udcff\\x1b[31mxxx") and len(text) < 100
    lab.later()
    assert symbolise._written(lab.asker.asked[0])  # can be asked


def test_processes_that_share_a_file_share_its_names(proc: Proc) -> None:
    lab = Lab(proc)
    lab.of(0x500010)
    own = os.getpid()
    found = next(m for m in maps.parse(Path("/proc/self/maps").read_bytes()).all if m.of_file)
    one, two = Native(FakeAsker(by_page)), Native(FakeAsker(by_page))
    for n in (one, two):
        n.learn({own: [(found.start,)]}, 0.0)
    (first,), _ = one._places.stack(own, (found.start,))
    (second,), _ = two._places.stack(own, (found.start,))
    assert first.module.id is not None and first.module.key == second.module.key
