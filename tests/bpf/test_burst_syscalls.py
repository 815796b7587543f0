"""The syscalls burst on counted calls, and on calls that sleep for a known time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan.burst import histogram, syscalls
from whyspan.burst.report import Report, SyscallRow

from tests.bpf import burst_child
from tests.bpf.burst_child import Work, during

pytestmark = pytest.mark.bpf


@pytest.fixture(scope="module")
def report_and_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Report, Work]]:
    path: Path = burst_child.build(tmp_path_factory.mktemp("burst"), "burst_work.c", "work")
    work = Work(path)
    yield during(syscalls, work, "1-1 getppid 1009 0", "2-2 sleep 13 3000"), work
    work.close()


def row(report: Report, thread: str, name: str) -> SyscallRow:
    (found,) = (r for r in report.syscalls if (r.thread, r.name) == (thread, name))
    return found


def test_every_call_is_counted(report_and_work: tuple[Report, Work]) -> None:
    report, work = report_and_work
    r = row(report, "a1", "getppid")
    assert (r.calls, r.errors, r.tid) == (1009, 0, work.tid("a1"))
    assert sum(r.buckets) == 1009
    assert r.blocked_ns == 0
    assert r.total_ns == r.on_cpu_ns + r.runnable_ns
    assert histogram.upper(r.buckets.index(next(filter(None, r.buckets)))) <= r.p50_ns <= r.p99_ns
    assert "begins" not in report.missed
    assert "rows_full" not in report.missed


def test_a_sleep_is_blocked_and_says_where(report_and_work: tuple[Report, Work]) -> None:
    report, _ = report_and_work
    r = row(report, "a2", "clock_nanosleep")
    assert r.calls == 13
    assert r.blocked_ns >= 13 * 3_000_000
    assert r.on_cpu_ns < r.blocked_ns
    assert "nanosleep" in r.waits_in
    assert "nanosleep" in r.stack[0]
    assert r.longest_ns >= 3_000_000
    assert sum(r.buckets[: histogram.bucket_of(3_000_000)]) == 0  # none took less


def test_it_says_what_is_still_going_on(report_and_work: tuple[Report, Work]) -> None:
    report, _ = report_and_work
    assert ("a1", "futex") in {(u.thread, u.name) for u in report.unfinished}


def test_the_way_is_told(report_and_work: tuple[Report, Work]) -> None:
    report, _ = report_and_work
    (hook,) = report.hooks
    assert hook.name in syscalls.WAYS
    assert hook.name == "kprobe" or "kprobe" in hook.reason
    assert report.expected.host_call_ns > 0
