"""The samples burst: what a process executes, 999 times per second and CPU: stacks of Python, program and kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from typing import Final, NamedTuple

from whyspan_probes.errors import ProbeFrameworkError
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found, discover
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Schema

from whyspan import clock
from whyspan.burst.errors import BurstError
from whyspan.burst.options import Options
from whyspan.burst.report import Hooked, Report
from whyspan.burst.target import Target, check_host
from whyspan.code.stacks import Stacks
from whyspan.model import CodeStack, StackFact
from whyspan.stacks import HAS_GIL, MAX_FRAMES, is_cut, merged, places

#: Not a round number: what happens every millisecond is not to be met each time, or never. Source: perf-record(1).
HZ: Final = 999
_PROBE: Final = "samples"
_RING_BYTES: Final = 4 << 20
#: Native frames get their names in another process; a burst waits so long for it.
_NAMING_S: Final = 5.0
#: What a sample costs the thread it hits, in us, and what that is as a share of a busy CPU: see samples.bpf.c.
_SAMPLE_US: Final = (2, 13)
_MAX_STACKS: Final = 2000  # those seen most often


class _Sample(NamedTuple):
    tid: int
    stack: int
    flags: int


def run(options: Options) -> Report:
    """Sample.

    Raises:
        BurstError: it cannot be done.
    """
    check_host()
    with Target(options.tgid) as target:
        low, high = (HZ * us / 1e4 for us in _SAMPLE_US)
        options.say(
            f"samples burst of process {target.tgid} ({target.name}), {HZ} per second and CPU: each of its running "
            f"threads is to take {low:.1f} to {high:.1f}% longer for {options.seconds:g} s"
        )
        try:
            return _measure(options, target)
        except ProbeFrameworkError as e:
            raise BurstError(str(e)) from e


def _measure(options: Options, target: Target) -> Report:
    (probe,) = (f for f in discover() if f.probe.name == _PROBE)
    hooks = tuple(dataclasses.replace(h, hz=HZ) for h in probe.probe.hooks)
    session = Session(
        [Found(dataclasses.replace(probe.probe, hooks=hooks), probe.object_path)], _RING_BYTES, options.kernel
    )
    with contextlib.closing(session):
        session.attach()
        state = session.probes[0].state
        if not session.probes[0].attached:
            raise BurstError(f"samples: {state.reason}")
        with contextlib.closing(Stacks(session.maps)) as stacks:
            burst = _Burst(session, stacks, target.tgid)
            report = Report(
                kind="samples",
                tgid=target.tgid,
                process=target.name,
                begun_unix_ns=clock.now_unix_ns(),
                seconds=0.0,
                ended="",
                hooks=[Hooked(name=_PROBE, state=state.state, by=state.hooks["tick"].used)],
            )
            names = target.threads()

            def progress(passed: float) -> None:
                burst.drain()
                options.progress(passed)

            report.seconds, report.ended = target.wait(options.seconds, options.stopped, progress)
            session.maps.unwatch(target.tgid)
            names |= target.threads()
            burst.finish()
            burst.fill(report, names)
    return report


class _Burst:
    def __init__(self, session: Session, stacks: Stacks, tgid: int) -> None:
        self._session, self._stacks, self._tgid = session, stacks, tgid
        self._schema, self._rows = Schema(session.event_types()), RowBuffer()
        self._counts: Counter[_Sample] = Counter()
        self._facts: dict[int, StackFact] = {}
        session.maps.watch(tgid, 0)
        self._problem = ""
        found = stacks.follow([tgid], time.monotonic()).get(tgid)
        if found is not None and found.problem:
            self._problem = f"frames of Python are not read: {found.problem}"

    def drain(self) -> None:
        for ring in self._session.maps.rings:
            ring.drain(self._rows)
        for row in self._schema.select(self._rows.take(), "cpu_sample"):
            if int(row["tgid"]) == self._tgid:
                self._counts[_Sample(int(row["tid"]), int(row["stack"]), int(row["aux"]))] += 1
        self._take()

    def _take(self) -> None:
        self._facts |= {f.id: f for f in self._stacks.take()}

    def finish(self) -> None:
        """Drain the rest, and wait for the names of native frames."""
        self.drain()
        end_s = time.monotonic() + _NAMING_S
        while self._stacks.naming and time.monotonic() < end_s:
            time.sleep(0.05)
            self._take()

    def fill(self, report: Report, names: dict[int, str]) -> None:
        found = []
        for s, n in self._counts.items():
            fact = self._facts.get(s.stack)
            if fact is None:
                continue
            found.append(
                CodeStack(
                    cause="",
                    tgid=self._tgid,
                    tid=s.tid,
                    thread=names.get(s.tid, ""),
                    samples=n,
                    python=fact.python[:MAX_FRAMES],
                    native=places(fact),
                    kernel=fact.kernel[:MAX_FRAMES],
                    cut=is_cut(fact, s.flags),
                    holder=bool(s.flags & HAS_GIL),
                    work=fact.work,
                    hint=fact.hint,
                )
            )
        report.calls = self._counts.total()
        rows = merged(found, len(found))
        report.samples = rows[:_MAX_STACKS]
        report.left_out = len(rows) - len(report.samples)
        lost = sum(self._session.maps.drops.read(self._schema.kind("cpu_sample")))
        nameless = report.calls - sum(r.samples for r in rows)
        report.missed = {k: n for k, n in (("lost", lost), ("without a stack", nameless)) if n}
        if self._problem:
            report.notes.append(self._problem)
