"""samples and waits: stacks of Python as the interpreter itself says them, on this kernel."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from whyspan.code.stacks import Stacks
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import Schema

from tests.bpf.stalls import SCRIPT, judge, run
from tests.bpf.waiting import until

pytestmark = pytest.mark.bpf

#: Debian's own, and this one if it is another; those of other releases are in tests/engine/test_other_pythons.py.
PYTHONS = sorted({p for p in ("/usr/bin/python3", sys._base_executable) if Path(p).exists()})  # type: ignore[attr-defined]

BLOCKED = """
import os, queue, sys, threading, time
lock, q, (r, w) = threading.Lock(), queue.Queue(), os.pipe()
lock.acquire()
def locked(): lock.acquire()
def queued(): q.get()
def piped(): os.read(r, 1)
for f in (locked, queued, piped):
    threading.Thread(target=f, daemon=True).start()
print("ready", flush=True)
def sleeper(n):
    return sleeper(n - 1) if n else sys.stdin.readline()
sleeper(3)
"""


@pytest.mark.parametrize("python", PYTHONS)
def test_samples_name_the_function_and_the_line(python: str, probes: dict[str, Found]) -> None:
    samples, told = run(probes["samples"], [python, str(SCRIPT)], 0.5)
    assert len(told) == 12
    judged = judge(samples, told)
    assert judged.samples > 50
    assert judged.wrong == []
    # Code that was executed once and is gone may have no name any more; everything else has its own.
    assert judged.right + sum(judged.unnamed.values()) == judged.samples
    assert all(name.startswith("made") for name in judged.unnamed), judged.unnamed
    assert len(judged.by_stall) == 12, judged.by_stall
    holding = sum(s.aux & 1 for s in samples)
    assert holding > 0.8 * judged.samples


def test_blocked_threads_are_told_once_where_they_are(probes: dict[str, Found]) -> None:
    session = Session([probes["waits"]], 1 << 20)
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        session.attach(config={"waits": {"min_ns": 20_000_000}})
        state = session.probes[0].state
        if state.state != "attached":
            pytest.skip(state.reason)
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        stacks, schema, rows = Stacks(session.maps), Schema(session.event_types()), RowBuffer()
        session.maps.watch(child.pid, 0)
        stacks.follow([child.pid], time.monotonic())
        named: dict[int, list[str]] = {}
        kernel: dict[int, list[str]] = {}

        def look() -> bool:
            session.probes[0].walk([child.pid])
            for ring in session.maps.rings:
                ring.drain(rows)
            facts = {f.id: f for f in stacks.take()}
            for row in schema.select(rows.take(), "wait_stack"):
                tid = int(row["tid"])
                assert tid not in named, "told twice in one block"
                fact = facts[int(row["stack"])]
                named[tid] = [f.function for f in fact.python]
                kernel[tid] = fact.kernel
            return len(named) == 4

        until(look, "four blocked threads")
        innermost = {names[0] for names in named.values()}
        # Queue.get waits in Condition.wait unless it is written in C.
        assert innermost - {"Queue.get", "Condition.wait"} == {"locked", "piped", "sleeper"}
        assert named[child.pid] == ["sleeper"] * 4 + ["<module>"]
        assert any("futex" in name for k in kernel.values() for name in k)
        for _ in range(5):
            session.probes[0].walk([child.pid])
        assert len(named) == 4
        assert child.poll() is None
        # A thread that has moved on, and blocks anew, is told again.
        child.communicate("\n")
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
        session.close()


def test_a_process_that_is_gone_is_walked_over_for_nothing(probes: dict[str, Found]) -> None:
    session = Session([probes["waits"]], 1 << 20)
    try:
        session.attach()
        session.probes[0].walk([2**22 - 1])
        assert session.probes[0].state.state in ("attached", "failed")
    finally:
        session.close()
