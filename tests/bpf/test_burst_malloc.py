"""The malloc burst on counted work: which thread, which function, which size, how often, and who waited for a lock."""

from __future__ import annotations

import ctypes.util
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whyspan.burst import malloc
from whyspan.burst.errors import BurstError, TooDearError
from whyspan.burst.options import Options
from whyspan.burst.report import Report
from whyspan_probes import features

from tests.bpf import burst_child
from tests.bpf.burst_child import Work, allow_all, during

pytestmark = pytest.mark.bpf

Start = Callable[..., Work]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("burst")


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    works: list[Work] = []

    def begin(*flags: str, name: str = "work", **options: object) -> Work:
        path = burst_child.build(folder, "burst_work.c", name, *flags)
        works.append(Work(path, **options))  # type: ignore[arg-type]
        return works[-1]

    yield begin
    for work in works:
        work.close()


def counted(report: Report, *names: str) -> Counter[tuple[str, str, int]]:
    """Calls by thread, function and size class, of the threads named."""
    out: Counter[tuple[str, str, int]] = Counter()
    for row in report.malloc:
        if row.thread in names:
            out[row.thread, row.function, row.size_class] += row.calls
    return out


def test_every_call_is_counted_once(start: Start) -> None:
    work = start()
    report = during(
        malloc,
        work,
        "1-1 malloc 1009 100",
        "2-2 realloc 211 5000",
        "3-3 calloc 307 100000",
        "4-4 aligned 401 1000",
        "1-2 malloc 13 4096",
    )
    assert counted(report, "a1", "a2", "a3", "a4") == {
        ("a1", "malloc", 128): 1009,
        ("a1", "malloc", 4096): 13,
        ("a1", "free", -1): 1009 + 13,
        # realloc of nothing goes on to malloc, and is one call all the same
        ("a2", "realloc", 8192): 211,
        ("a2", "realloc", 16384): 211,
        ("a2", "malloc", 4096): 13,
        ("a2", "free", -1): 211 + 13,
        ("a3", "calloc", 131072): 307,
        ("a3", "free", -1): 307,
        ("a4", "posix_memalign", 1024): 401,
        ("a4", "free", -1): 401,
    }
    rows = {(r.thread, r.function, r.size_class): r for r in report.malloc}
    assert rows["a1", "malloc", 128].tid == work.tid("a1")
    assert rows["a1", "malloc", 128].bytes == 1009 * 100
    assert rows["a3", "calloc", 131072].bytes == 307 * 100_000
    assert all(r.timed == r.calls and r.mean_ns <= r.max_ns for r in report.malloc)
    assert not report.missed
    assert report.left_out == 0
    (hook,) = report.hooks
    assert (hook.name, hook.state) == ("glibc", "attached")
    stack = rows["a1", "malloc", 128].stack
    assert report.symbols == "bcc"
    assert stack[0].startswith("obey"), stack
    assert rows["a1", "malloc", 128].depth == len(stack) >= 1


@pytest.mark.parametrize("without", [(".multi",), ("tp_btf",), (".multi", "tp_btf")])
def test_on_older_kernels(start: Start, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]) -> None:
    """Without links for many places (6.6), without programs that need the kernel's own BTF, without both."""
    original = features.HookTable.missing

    def missing(self: features.HookTable, section: str) -> str:
        kind = section.partition("/")[0]
        return "not in this test" if kind.endswith(without) else original(self, section)

    monkeypatch.setattr(features.HookTable, "missing", missing)
    work = start(env={"MALLOC_ARENA_MAX": "1"})
    report = during(malloc, work, "1-1 malloc 1009 100", "2-3 fight 2 3000")
    assert counted(report, "a1") == {("a1", "malloc", 128): 1009, ("a1", "free", -1): 1009}
    (hook,) = report.hooks
    assert (hook.by == ["uretprobe", "uprobe"]) == (".multi" in without)
    assert report.lock_waits > 0


def test_frame_pointers_lead_on(start: Start) -> None:
    work = start("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", name="framed")
    report = during(malloc, work, "1-1 malloc 101 100")
    (row,) = (r for r in report.malloc if r.thread == "a1" and r.function == "malloc")
    assert [name.split()[0] for name in row.stack[:2]] == ["obey", "work"]
    assert row.depth >= 2


def test_threads_that_fight_for_the_arena_are_told_from_one_that_does_not(start: Start) -> None:
    work = start(env={"MALLOC_ARENA_MAX": "1"})
    report = during(malloc, work, "5-5 malloc 503 100", "1-3 fight 2 3000")
    waits: Counter[str] = Counter()
    blocked: Counter[str] = Counter()
    for row in report.malloc:
        waits[row.thread] += row.lock_waits
        blocked[row.thread] += row.blocked_ns
    assert all(waits[t] > 0 and blocked[t] > 0 for t in ("a1", "a2", "a3")), waits
    assert waits["a5"] == 0
    assert report.lock_waits == sum(waits.values())
    assert report.malloc[0].thread in ("a1", "a2", "a3")


def test_a_preloaded_allocator_is_the_one_that_counts(start: Start, folder: Path) -> None:
    stub = burst_child.build(folder, "burst_stub.c", "libstub.so", "-shared", "-fPIC")
    work = start(env={"LD_PRELOAD": str(stub)})
    report = during(malloc, work, "1-1 malloc 1013 100", "2-2 realloc 53 300")
    assert {h.name for h in report.hooks} == {"jemalloc", "glibc"}
    assert {r.allocator for r in report.malloc if r.thread in ("a1", "a2")} == {"jemalloc"}
    assert counted(report, "a1", "a2") == {
        ("a1", "malloc", 128): 1013,
        ("a1", "free", -1): 1013,
        ("a2", "realloc", 512): 53,
        ("a2", "realloc", 1024): 53,
        ("a2", "free", -1): 53,
    }


@pytest.mark.parametrize("library", ["jemalloc", "tcmalloc_minimal"])
def test_real_allocators(start: Start, library: str) -> None:
    path = ctypes.util.find_library(library)
    if path is None:
        pytest.skip(f"lib{library} is not installed")
    work = start(env={"LD_PRELOAD": path})
    report = during(malloc, work, "1-1 malloc 1013 100", "3-3 calloc 211 3000")
    assert {r.allocator for r in report.malloc if r.thread in ("a1", "a3")} == {
        library.removesuffix("_minimal")
    }
    assert counted(report, "a1", "a3") == {
        ("a1", "malloc", 128): 1013,
        ("a1", "free", -1): 1013,
        ("a3", "calloc", 4096): 211,
        ("a3", "free", -1): 211,
    }


def test_an_allocator_within_the_program(start: Start) -> None:
    work = start("-static", name="static")
    report = during(malloc, work, "1-1 malloc 509 100")
    assert counted(report, "a1") == {("a1", "malloc", 128): 509, ("a1", "free", -1): 509}
    (hook,) = report.hooks
    assert hook.path.endswith("static")


def test_a_stripped_program_says_why_not(start: Start, folder: Path) -> None:
    stripped = burst_child.build(folder, "burst_work.c", "stripped", "-static", "-s")
    work = start("-static", "-s", name=stripped.name)
    with pytest.raises(BurstError, match="linked into a stripped program cannot be found"):
        malloc.run(Options(work.tgid, 1))


def test_a_filtered_process_is_counted_without_times(start: Start) -> None:
    work = start(before=allow_all)
    report = during(malloc, work, "1-1 malloc 1009 100")
    (hook,) = report.hooks
    assert hook.state == "entry only"
    assert "seccomp" in hook.reason
    assert counted(report, "a1") == {("a1", "malloc", 128): 1009, ("a1", "free", -1): 1009}
    assert all(r.timed == 0 and r.blocked_ns == 0 for r in report.malloc)
    work.do("1-1 malloc 3 100")  # it lives


def test_what_would_cost_too_much_is_refused(start: Start) -> None:
    work = start()
    said: list[str] = []
    work.begin("1-1 fight 5 100")
    with pytest.raises(TooDearError, match="--force"):
        malloc.run(Options(work.tgid, 1, say=said.append))
    assert "calls/s" in said[0]
    assert "times as long" in said[0]
    work.end()


def test_the_process_may_end_meanwhile(start: Start) -> None:
    work = start()

    def progress(_: float) -> None:
        work.do("1-1 malloc 101 100")
        subprocess.run(["kill", "-9", str(work.tgid)], check=True)

    report = malloc.run(Options(work.tgid, 60, progress=progress))
    assert report.ended == "process ended"
    assert counted(report, "a1")["a1", "malloc", 128] == 101


def test_other_processes_are_not_counted(start: Start) -> None:
    work, other = start(), start()
    done: list[int] = []

    def progress(_: float) -> None:
        if not done:
            other.do("1-1 malloc 1009 100")
            done.append(1)

    report = malloc.run(Options(work.tgid, 60, progress=progress, stopped=lambda: bool(done)))
    assert not counted(report, "a1")


def test_there_is_no_such_process() -> None:
    with pytest.raises(BurstError, match="there is no process 4194304"):
        malloc.run(Options(4_194_304, 1))


def test_a_thread_is_not_a_process(start: Start) -> None:
    work = start()
    with pytest.raises(BurstError, match=f"is a thread of process {work.tgid}"):
        malloc.run(Options(work.tid("a1"), 1))
