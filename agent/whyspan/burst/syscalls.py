"""The syscalls burst: how long each system call of a process takes, and what it sleeps in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from whyspan import clock
from whyspan import syscalls as numbers
from whyspan.burst import cost, histogram, stacks
from whyspan.burst.errors import BurstError
from whyspan.burst.obj import SWITCH, BurstObject
from whyspan.burst.options import SLACK_NS, Options
from whyspan.burst.report import Expected, Hooked, Report, SyscallRow, Unfinished
from whyspan.burst.target import Target, check_host
from whyspan.text import clean

_OBJECT = "syscalls_burst"
#: In order of preference: the functions of the system calls, else the tracepoints around all of them.
WAYS = ("kprobe", "raw")
_WHAT = {
    "kprobe": "kprobe.multi on the function of every system call",
    "raw": "raw tracepoints sys_enter and sys_exit: every system call of the host takes the slow way meanwhile",
}


def run(options: Options) -> Report:
    """Measure.

    Raises:
        BurstError: it cannot be done, or would be too dear.
    """
    check_host()
    with Target(options.tgid) as target:
        refused: list[str] = []
        for way in WAYS:
            try:
                expected = _look(options, target, way)
            except BurstError as e:
                refused.append(f"{way}: {e}")
                continue
            options.say(
                f"syscalls burst of process {target.tgid} ({target.name}) by {_WHAT[way]}: "
                + cost.describe(expected, "system", options.seconds)
            )
            cost.check(expected, force=options.force)
            return _measure(options, target, way, expected, refused)
        raise BurstError("; ".join(refused))


def _look(options: Options, target: Target, way: str) -> Expected:
    o = BurstObject(
        _OBJECT,
        {"look": [[f"syscalls_sample_{way}"]]},
        tgid=target.tgid,
        deadline_ns=time.monotonic_ns() + SLACK_NS,
        kernel=options.kernel,
    )
    with contextlib.closing(o):
        o.attach("look")
        seconds, _ = target.wait(cost.LOOK_S, options.stopped, lambda _: None)
        names = target.threads()
        o.detach()
        keys, counts = o.rows("burst_sample", o.btf.struct_dtype("burst_place"), np.dtype("<u8"))
    ns = cost.HOST_SYSCALL_NS, cost.SYSCALL_NS
    loads = {int(k["tid"]): cost.Load().plus(int(n), *ns) for k, n in zip(keys, counts, strict=True)}
    expected = cost.expect(loads, names, seconds, cost.SYSCALL_NS)
    expected.host_call_ns = cost.HOST_SYSCALL_NS
    return expected


def _measure(options: Options, target: Target, way: str, expected: Expected, refused: list[str]) -> Report:
    o = BurstObject(
        _OBJECT,
        {
            "enter": [[f"syscalls_enter_{way}"]],
            "exit": [[f"syscalls_exit_{way}"]],
            "switch": [[s] for s in SWITCH],
        },
        tgid=target.tgid,
        deadline_ns=time.monotonic_ns() + int(options.seconds * 1e9) + SLACK_NS,
        kernel=options.kernel,
    )
    with contextlib.closing(o):
        code = stacks.Code(target.tgid)
        for hook in ("switch", "exit", "enter"):
            o.attach(hook)
        begun_ns = clock.now_unix_ns()
        names = target.threads()
        seconds, ended = target.wait(options.seconds, options.stopped, options.progress)
        end_ns = time.monotonic_ns()
        names |= target.threads()
        o.detach()
        code = stacks.Code(target.tgid) if target.alive else code
        hooked = Hooked(
            name=way,
            state="attached",
            by=list(o.used.values()),
            reason="; ".join(refused),
            functions=[_WHAT[way]],
        )
        report = Report(
            kind="syscalls",
            tgid=target.tgid,
            process=target.name,
            begun_unix_ns=begun_ns,
            seconds=seconds,
            ended=ended,
            expected=expected,
            hooks=[hooked],
            missed=o.missed(),
        )
        _fill(report, o, code, names, top=options.top, end_ns=end_ns)
    return report


def _fill(
    report: Report, o: BurstObject, code: stacks.Code, names: Mapping[int, str], *, top: int, end_ns: int
) -> None:
    sum_type, size = o.btf.struct_dtype("syscall_sum"), o.btf.enum("syscall_buckets")["BUCKETS"]
    row_type = np.dtype([("sum", sum_type), ("buckets", "<u8", (size,))])
    keys, rows = o.rows("syscall_rows", o.btf.struct_dtype("syscall_key"), row_type)
    sums = rows["sum"]
    report.calls = int(sums["calls"].sum())
    report.blocked_ns = int(sums["blocked_ns"].sum())
    order = np.lexsort((sums["calls"], sums["total_ns"], sums["blocked_ns"]))[::-1]
    report.left_out = max(0, len(order) - top)
    chosen = [
        (
            keys[i],
            rows[i],
            code.true_part(o.stack(int(sums[i]["slowest"]))),
            o.stack(int(sums[i]["longest_kernel"])),
        )
        for i in order[:top]
    ]
    open_calls = _open(o)
    called = stacks.name(
        report.tgid,
        code,
        (a for *_, user, _ in chosen for a in user),
        kernel=(a for *_, kernel in chosen for a in kernel),
        syscalls=[*(int(k["nr"]) for k, *_ in chosen), *(nr for _, nr, _ in open_calls)],
    )
    report.symbols = called.by

    def name_of(nr: int) -> str:
        return called.syscalls.get(nr) or numbers.NAMES.get(nr) or f"syscall {nr}"

    for key, row, user, kernel in chosen:
        s, tid, buckets = row["sum"], int(key["tid"]), [int(n) for n in row["buckets"]]
        calls, total, blocked, runnable = (
            int(s[f]) for f in ("calls", "total_ns", "blocked_ns", "runnable_ns")
        )
        report.syscalls.append(
            SyscallRow(
                tid=tid,
                thread=names.get(tid) or clean(s["comm"].decode(errors="replace")),
                nr=int(key["nr"]),
                name=name_of(int(key["nr"])),
                calls=calls,
                errors=int(s["errors"]),
                mean_ns=total / calls if calls else 0.0,
                p50_ns=histogram.quantile(buckets, 0.5),
                p99_ns=histogram.quantile(buckets, 0.99),
                max_ns=int(s["max_ns"]),
                total_ns=total,
                blocked_ns=blocked,
                runnable_ns=runnable,
                on_cpu_ns=max(0, total - blocked - runnable),
                longest_ns=int(s["longest_ns"]),
                waits_in=stacks.waits_in(called.kernel.get(a, "") for a in kernel),
                buckets=buckets,
                stack=called.stack(user),
            )
        )
    for tid, nr, begin_ns in open_calls[:top]:
        report.unfinished.append(
            Unfinished(
                tid=tid, thread=names.get(tid, ""), name=name_of(nr), since_ns=max(0, end_ns - begin_ns)
            )
        )


def _open(o: BurstObject) -> list[tuple[int, int, int]]:
    """Calls that have not ended: (thread, number, begin), the oldest first."""
    off = o.btf.struct_dtype("burst_off")
    call = np.dtype([("begin_ns", "<u8"), ("nr", "<i4"), ("_pad", "<u4"), ("off", off)])
    keys, calls = o.rows("syscall_calls", np.dtype("<u4"), call)
    found: list[Any] = [
        (int(t), int(c["nr"]), int(c["begin_ns"])) for t, c in zip(keys, calls, strict=True) if c["begin_ns"]
    ]
    return sorted(found, key=lambda f: f[2])
