"""The malloc burst: who allocates what, where, and who sleeps for the allocator's locks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from whyspan import clock
from whyspan.burst import allocators, cost, stacks
from whyspan.burst.allocators import Allocator
from whyspan.burst.errors import BurstError
from whyspan.burst.obj import SWITCH, BurstObject
from whyspan.burst.options import SLACK_NS, Options
from whyspan.burst.plan import Plan, make
from whyspan.burst.report import Expected, Hooked, MallocRow, Report
from whyspan.burst.target import Target, check_host
from whyspan.text import clean

_OBJECT = "malloc_burst"
_NO_SIZE = 255  # malloc_burst.bpf.c: NO_CLASS
_ORDER = ("blocked_ns", "lock_waits", "bytes", "calls")
_MAX_NAMED = 24  # frames of a stack; its depth is told in full


def run(options: Options) -> Report:
    """Measure.

    Raises:
        BurstError: it cannot be done, or would be too dear.
    """
    features = check_host()
    with Target(options.tgid) as target:
        found = allocators.find(target.tgid)
        if not found.allocators:
            raise BurstError(f"process {target.tgid}: {'; '.join(found.notes) or 'it has no allocator'}")
        plan = make(target.tgid, found.allocators, features)
        with _files(found.allocators) as fds:
            expected, called = _look(options, target, plan, fds)
            options.say(
                f"malloc burst of process {target.tgid} ({target.name}): "
                + cost.describe(expected, "malloc", options.seconds)
            )
            cost.check(expected, force=options.force)
            return _measure(options, target, plan, fds, expected=expected, called=called, notes=found.notes)


@contextlib.contextmanager
def _files(found: Sequence[Allocator]) -> Iterator[dict[Allocator, int]]:
    fds: dict[Allocator, int] = {}
    try:
        for a in found:
            try:
                fds[a] = os.open(a.open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError as e:
                raise BurstError(f"{clean(a.path)}: {e.strerror}") from e
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def _both(name: str) -> tuple[tuple[str], tuple[str]]:
    return (f"malloc_{name}_multi",), (f"malloc_{name}_perf",)


def _look(
    options: Options, target: Target, plan: Plan, fds: Mapping[Allocator, int]
) -> tuple[Expected, dict[str, int]]:
    """See how often the functions are called; returns what to expect, and calls by file."""
    o = BurstObject(
        _OBJECT,
        {"look": _both("sample")},
        tgid=target.tgid,
        deadline_ns=time.monotonic_ns() + SLACK_NS,
        kernel=options.kernel,
    )
    with contextlib.closing(o):
        for a, fd in fds.items():
            numbers = [*plan.with_return.get(a, ()), *plan.entry_only.get(a, ())]
            o.attach_user("look", fd, plan.places(o.btf, numbers), target.tgid)
        seconds, _ = target.wait(cost.LOOK_S, options.stopped, lambda _: None)
        names = target.threads()
        o.detach()
        keys, counts = o.rows("burst_sample", o.btf.struct_dtype("burst_place"), np.dtype("<u8"))
    loads: dict[int, cost.Load] = {}
    called: dict[str, int] = {}
    only = {n for numbers in plan.entry_only.values() for n in numbers}
    for (tid, number), n in zip(keys.tolist(), counts.tolist(), strict=True):
        allocator, function = plan.functions[number]
        burst = cost.ENTRY_NS if number in only else cost.PAIR_NS
        ns = cost.LOOK_NS[function.stepped], burst[function.stepped]
        loads[tid] = loads.get(tid, cost.Load()).plus(n, *ns)
        called[allocator.path] = called.get(allocator.path, 0) + n
    usual = cost.PAIR_NS if plan.with_return else cost.ENTRY_NS
    return cost.expect(loads, names, seconds, usual[False]), called


def _measure(
    options: Options,
    target: Target,
    plan: Plan,
    fds: Mapping[Allocator, int],
    *,
    expected: Expected,
    called: Mapping[str, int],
    notes: Sequence[str],
) -> Report:
    hooks: dict[str, Sequence[Sequence[str]]] = {}
    if plan.with_return:
        hooks |= {"entry": _both("entry"), "return": _both("return"), "switch": [[s] for s in SWITCH]}
    if plan.entry_only:
        hooks["only"] = _both("only")
    o = BurstObject(
        _OBJECT,
        hooks,
        tgid=target.tgid,
        deadline_ns=time.monotonic_ns() + int(options.seconds * 1e9) + SLACK_NS,
        kernel=options.kernel,
    )
    with contextlib.closing(o):
        code = stacks.Code(target.tgid)
        by: dict[Allocator, list[str]] = {}
        if plan.with_return:
            o.attach("switch")
        # Returns first: a call whose end is not hooked would be taken for one that goes on.
        for hook, wanted in (
            ("return", plan.with_return),
            ("entry", plan.with_return),
            ("only", plan.entry_only),
        ):
            for a, numbers in wanted.items():
                by.setdefault(a, []).append(
                    o.attach_user(hook, fds[a], plan.places(o.btf, numbers), target.tgid)
                )
        begun_ns = clock.now_unix_ns()
        names = target.threads()
        seconds, ended = target.wait(options.seconds, options.stopped, options.progress)
        names |= target.threads()
        o.detach()
        code = stacks.Code(target.tgid) if target.alive else code
        report = Report(
            kind="malloc",
            tgid=target.tgid,
            process=target.name,
            begun_unix_ns=begun_ns,
            seconds=seconds,
            ended=ended,
            expected=expected,
            hooks=[_hooked(a, plan, by.get(a, [])) for a in fds],
            notes=[clean(n) for n in notes],
            missed=o.missed(),
        )
        _fill(report, o, plan, code, names, top=options.top)
    used = {r.allocator for r in report.malloc}
    if not report.calls and not sum(called.values()):
        report.notes.append(
            "nobody called these functions: either nothing was allocated, or it is done by an allocator that is "
            "linked in without symbols"
        )
    elif len(used) == 1 and len(fds) > 1:
        report.notes.append(f"all calls went to {used.pop()}")
    return report


def _hooked(a: Allocator, plan: Plan, by: Sequence[str]) -> Hooked:
    return Hooked(
        name=a.name,
        path=clean(a.path),
        state="attached" if a in plan.with_return else "entry only",
        by=list(by),
        functions=[f.symbol for f in a.functions],
        reason=plan.why.get(a, ""),
    )


def _fill(
    report: Report, o: BurstObject, plan: Plan, code: stacks.Code, names: Mapping[int, str], *, top: int
) -> None:
    rows = _rows(o, code)
    report.calls = sum(r.sums["calls"] for r in rows)
    report.blocked_ns = sum(r.sums["blocked_ns"] for r in rows)
    report.lock_waits = sum(r.sums["lock_waits"] for r in rows)
    rows.sort(key=lambda r: [r.sums[f] for f in _ORDER], reverse=True)
    report.left_out = max(0, len(rows) - top)
    called = stacks.name(report.tgid, code, (a for r in rows[:top] for a in r.frames[:_MAX_NAMED]))
    report.symbols = called.by
    for r in rows[:top]:
        a, f = plan.functions[r.function]
        timed = r.sums["timed"]
        report.malloc.append(
            MallocRow(
                tid=r.tid,
                thread=names.get(r.tid) or r.comm,
                allocator=a.name,
                function=f.name,
                size_class=-1 if r.size_class == _NO_SIZE else 1 << r.size_class,
                calls=r.sums["calls"],
                timed=timed,
                bytes=r.sums["bytes"],
                mean_ns=r.sums["total_ns"] / timed if timed else 0.0,
                max_ns=r.sums["max_ns"],
                blocked_ns=r.sums["blocked_ns"],
                mean_blocked_ns=r.sums["blocked_ns"] / timed if timed else 0.0,
                max_blocked_ns=r.sums["max_blocked_ns"],
                runnable_ns=r.sums["runnable_ns"],
                lock_waits=r.sums["lock_waits"],
                depth=len(r.frames),
                stack=called.stack(r.frames[:_MAX_NAMED]),
            )
        )


class _Row(NamedTuple):
    tid: int
    function: int
    size_class: int
    comm: str
    frames: tuple[int, ...]
    sums: dict[str, int]


def _rows(o: BurstObject, code: stacks.Code) -> list[_Row]:
    """Return the kernel's rows, those whose stacks are the same as far as they can be true as one."""
    key_type, sum_type = o.btf.struct_dtype("malloc_key"), o.btf.struct_dtype("malloc_sum")
    fields = [f for f in sum_type.names or () if f != "comm"]
    found: dict[tuple[int, int, int, tuple[int, ...]], _Row] = {}
    seen: dict[tuple[int, int], tuple[int, ...]] = {}
    for name in ("malloc_rows", "malloc_rest"):
        for key, row in zip(*o.rows(name, key_type, sum_type), strict=True):
            caller, number = int(key["caller"]), int(key["stack"])
            if (caller, number) not in seen:
                seen[caller, number] = tuple(code.true_part(stacks.of_call(caller, o.stack(number))))
            frames = seen[caller, number]
            tid, function, size_class = int(key["tid"]), int(key["function"]), int(key["size_class"])
            sums = {f: int(row[f]) for f in fields}
            known = found.get((tid, function, size_class, frames))
            if known is None:
                comm = clean(row["comm"].decode(errors="replace"))
                found[tid, function, size_class, frames] = _Row(tid, function, size_class, comm, frames, sums)
                continue
            for f, value in sums.items():
                known.sums[f] = max(known.sums[f], value) if f.startswith("max_") else known.sums[f] + value
    return list(found.values())
