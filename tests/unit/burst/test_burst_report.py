"""Reports of bursts: the tables, the JSON, the files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console
from whyspan import cli
from whyspan.burst import files, table
from whyspan.burst.report import Hooked, MallocRow, Report, SyscallRow, Unfinished

EVIL = "\x1b[31m\u202eroot\x07"


def malloc_row(thread: str = "worker-1", size: int = 128, blocked: int = 5_000_000, **more: int) -> MallocRow:
    return MallocRow(
        tid=more.get("tid", 8),
        thread=thread,
        allocator="glibc",
        function="malloc" if size >= 0 else "free",
        size_class=size,
        calls=1009,
        timed=more.get("timed", 1009),
        bytes=100_900,
        mean_ns=1_000.0,
        max_ns=2_000_000,
        blocked_ns=blocked,
        mean_blocked_ns=blocked / 1009,
        max_blocked_ns=blocked,
        runnable_ns=0,
        lock_waits=more.get("waits", 7),
        depth=5,
        stack=[
            "std::vector<int>::push_back(int const&) [server]",
            "handle [server]",
            "main [server]",
            "x",
            "y",
        ],
    )


def report(**more: object) -> Report:
    base = Report(
        kind="malloc",
        tgid=7,
        process="server",
        begun_unix_ns=1_767_323_045_678_000_000,
        seconds=2.0,
        ended="time",
        hooks=[Hooked(name="glibc", path="/lib/libc.so.6", state="attached", by=["uprobe.multi"])],
        malloc=[malloc_row(), malloc_row(size=-1, blocked=0, waits=0), malloc_row("idle", 1 << 20, 100_000)],
        calls=3027,
        blocked_ns=5_100_000,
        lock_waits=14,
        symbols="bcc",
    )
    return msgspec.structs.replace(base, **more)


def shown(r: Report, rows: int = 30) -> str:
    out = io.StringIO()
    table.show(r, Console(file=out, width=200, markup=False, emoji=False, highlight=False), rows)
    return out.getvalue()


def cells(text: str, *words: str) -> list[str]:
    (line,) = (ln for ln in text.splitlines() if all(w in ln for w in words))
    return line.split()


def test_the_heat_table() -> None:
    text = shown(report())
    assert "malloc burst of process 7 (server), 2026-01-02T03:04:05.678Z, 2.00 s, ended by: time" in text
    assert "glibc /lib/libc.so.6: attached by uprobe.multi" in text
    row = cells(text, "worker-1", "malloc", "≤ 128 B")
    assert row[:3] == ["8", "worker-1", "malloc"]
    # size, calls, bytes, mean blocked time, lock waits, the longest, depth
    assert row[3:13] == ["≤", "128", "B", "1,009", "98.5", "KiB", "5.0", "7", "2.00", "5"]
    assert "std::vector<int>::push_back(int const&)" in text
    assert "…" in text
    assert cells(text, "free")[3] == "-"  # it is told no size
    assert "3,027 calls, 5.1 ms blocked in all, 14 lock acquisitions that blocked" in text
    assert "frame pointers" in text


def test_rows_that_are_not_shown_are_counted() -> None:
    text = shown(report(left_out=40), 2)
    assert "idle" not in text
    assert "41 rows are not shown" in text


def test_without_returns_there_are_no_times() -> None:
    rows = [malloc_row(timed=0, blocked=0, waits=0)]
    assert cells(shown(report(malloc=rows)), "worker-1")[9:12] == ["-", "-", "-"]


def test_what_was_missed_and_how_names_were_had() -> None:
    text = shown(report(missed={"rows_full": 31}, symbols="maps", notes=["a note"]))
    assert "missed: rows full 31" in text
    assert "names by maps: install python3-bpfcc" in text
    assert "a note" in text


def syscall_row() -> SyscallRow:
    buckets = [0] * 40
    buckets[12] = 11
    buckets[24] = 2
    return SyscallRow(
        tid=8,
        thread="loop",
        nr=202,
        name="futex",
        calls=13,
        errors=1,
        mean_ns=2_000_000.0,
        p50_ns=4096,
        p99_ns=1 << 24,
        max_ns=12_000_000,
        total_ns=26_000_000,
        blocked_ns=24_000_000,
        runnable_ns=500_000,
        on_cpu_ns=1_500_000,
        longest_ns=11_000_000,
        waits_in="futex_do_wait",
        buckets=buckets,
        stack=["__lll_lock_wait [libc.so.6]"],
    )


def test_the_table_of_system_calls() -> None:
    r = report(
        kind="syscalls",
        malloc=[],
        syscalls=[syscall_row()],
        unfinished=[Unfinished(tid=9, thread="io", name="epoll_wait", since_ns=1_500_000_000)],
    )
    text = shown(r)
    row = cells(text, "loop", "futex")
    assert row[:9] == ["8", "loop", "futex", "13", "1", "2,000.0", "4.1", "µs", "16.8"]
    assert "█" in text
    assert "futex_do_wait" in text
    assert "__lll_lock_wait [libc.so.6]" in text
    assert "still in a call at the end: thread 9 (io), epoll_wait, for 1,500 ms" in text
    assert "lock acquisitions" not in text


def test_nothing_gets_at_the_terminal() -> None:
    evil = malloc_row(EVIL)
    evil.stack = [EVIL]
    text = shown(report(process=EVIL, malloc=[evil], notes=[EVIL], hooks=[Hooked(name=EVIL, state=EVIL)]))
    assert not set(text) & set("\x1b\x07\u202e")


def test_json_is_read_again() -> None:
    r = report()
    assert msgspec.json.decode(msgspec.json.encode(r), type=Report) == r
    assert json.loads(msgspec.json.encode(r))["malloc"][0]["lock_waits"] == 7


def test_files_are_bounded_and_the_newest_is_first(tmp_path: Path) -> None:
    for n in range(files.KEPT + 5):
        files.write(files.path_for(tmp_path, "malloc", 10**18 + n, 7), report(tgid=n))
    files.tidy(tmp_path)
    kept = files.stored(tmp_path)
    assert len(kept) == files.KEPT
    newest = files.read(kept[0])
    assert newest is not None
    assert newest.tgid == files.KEPT + 4
    assert files.folder(tmp_path).stat().st_mode & 0o077 == 0
    assert kept[0].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"{", b'{"kind": 3}', b"\xff"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert files.read(path) is None
    assert files.read(tmp_path / "gone.json") is None


def last(state_dir: Path, *options: str) -> tuple[int, str, str]:
    env = {"WHYSPAN_OVERRIDES": json.dumps({"run": {"state_dir": str(state_dir)}})}
    runner = CliRunner()
    with runner.isolation(env=env) as (out, err, _):
        code = 0
        try:
            cli.main(["burst", "last", *options])
        except SystemExit as e:
            code = int(e.code or 0)
        return code, out.getvalue().decode(), err.getvalue().decode() if err else ""


def test_the_last_one(tmp_path: Path) -> None:
    code, _, _ = last(tmp_path)
    assert code == 1
    own = tmp_path / "collector"
    own.mkdir()
    files.write(files.path_for(own, "malloc", 1, 7), report())
    broken = files.path_for(own, "malloc", 2, 7)
    broken.write_bytes(b"half of it")
    code, out, _ = last(tmp_path)
    assert (code, "malloc burst of process 7" in out) == (0, True)
    code, out, _ = last(tmp_path, "--json")
    assert json.loads(out)["tgid"] == 7


@pytest.mark.parametrize(
    "command", [["burst"], ["burst", "malloc"], ["burst", "syscalls"], ["burst", "last"]]
)
def test_help(command: list[str]) -> None:
    done = CliRunner().invoke(cli.group, [*command, "--help"])
    assert done.exit_code == 0
    assert done.output.startswith("Usage:")


@pytest.mark.parametrize("seconds", ["0", "61", "nan"])
def test_the_time_is_bounded(seconds: str) -> None:
    done = CliRunner().invoke(cli.group, ["burst", "malloc", "--pid", "1", "--seconds", seconds])
    assert done.exit_code == 2, done.output


def test_without_privileges_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from whyspan.burst import target
    from whyspan.burst.errors import BurstError
    from whyspan_probes.features import read_features

    real = read_features()
    monkeypatch.setattr(target, "read_features", lambda: real._replace(capabilities=frozenset()))
    done = CliRunner().invoke(cli.group, ["burst", "malloc", "--pid", "1"])
    assert isinstance(done.exception, BurstError)
    assert str(done.exception).startswith("a burst needs root")
    assert "\n" not in str(done.exception)
