"""futex: which lock a thread waits for, what its address is, and who holds it, in real processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whyspan.facts import Facts
from whyspan.lockfacts import LockFacts
from whyspan.locks import GIL, MALLOC, MUTEX, Locks, LockWait
from whyspan.model import Batch
from whyspan.threads import Timelines

from tests.bpf.child import Child
from tests.bpf.conftest import Spawn, Watch
from tests.bpf.watcher import Watcher
from tests.faults.host.native import build

pytestmark = pytest.mark.bpf


def timelines(w: Watcher, tgid: int) -> Timelines:
    """What was seen, with what the process's locks are."""
    w.drain()
    facts = Facts()
    events = w.events[w.events["ts_ns"].argsort(kind="stable")]
    facts.update(Batch(0, events, facts=[LockFacts().read(tgid)]), w.schema)
    return Timelines(w.schema, [events], int(events["ts_ns"][0]), int(events["ts_ns"][-1]), facts)


def waits(found: Timelines, tid: int) -> list[LockWait]:
    """The waits for locks of a thread, each once."""
    thread, locks = found.thread(tid), found.shared(Locks)
    out: dict[int, LockWait] = {}
    for t in thread.ts:
        state = thread.before(t)
        if state.state == "blocked" and state.at >= 0:
            wait = locks.find(tid, thread, state.at, thread.wait(state.at))
            if wait is not None:
                out[wait.start_ns] = wait
    return [out[t] for t in sorted(out)]


def run(w: Watcher, child: Child) -> Timelines:
    """Watch the child work."""
    w.watch(child.tgid)
    child.run()
    return timelines(w, child.tgid)


def test_the_holder_of_the_interpreter_lock_is_named(watch: Watch, spawn: Spawn, tmp_path: Path) -> None:
    w, child = watch("futex", "sched"), spawn("gil_waits", build(tmp_path), 7)
    found = [x for x in waits(run(w, child), child.facts["main"]) if x.kind == GIL]
    long = [x for x in found if x.end_ns - x.start_ns > 20_000_000]
    assert len(long) == 7
    assert {x.holder_tid for x in long} == {child.facts["holder"]}
    # What is one wait was many sleeps of 5 ms.
    rows = w.rows("futex_wait", tid=child.facts["main"])
    assert len(rows[(rows["aux"] & 0x100) != 0]) >= 7 * 4


def test_a_mutex_by_its_address_owner_and_caller(watch: Watch, spawn: Spawn, tmp_path: Path) -> None:
    library = build(tmp_path)
    w, child = watch("futex", "sched"), spawn("mutex_waits", library, 11)
    found = [x for x in waits(run(w, child), child.facts["main"]) if x.kind == MUTEX]
    assert len(found) == 11
    assert {(x.holder_tid, x.address) for x in found} == {(child.facts["holder"], child.facts["address"])}
    # Neither libc, whose code waits, nor a word of the stack: the library that took the mutex.
    assert {x.library for x in found} == {str(library)}
    rows = w.rows("futex_wait", tid=child.facts["main"], uaddr=child.facts["address"])
    assert set(rows["owner"].tolist()) == {child.facts["holder"]}


def test_the_allocators_lock_in_a_libc_without_symbols(
    watch: Watch, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    w, child = watch("futex", "sched"), spawn("malloc_waits", build(tmp_path), 13)
    fact = LockFacts().read(child.tgid)
    assert fact.main_arena
    assert not fact.note
    found = [x for x in waits(run(w, child), child.facts["main"]) if x.kind == MALLOC]
    assert len([x for x in found if x.end_ns - x.start_ns > 3_000_000]) >= 13
    assert {x.address for x in found} == {fact.main_arena}
    assert {x.holder_tid for x in found} == {child.facts["holder"]}


def pythons() -> list[str]:
    """Interpreters of the machine, of several builds; before 3.10 the lock has no bytes in the file to be found by."""
    found = [sys.executable, "/usr/bin/python3"]
    found += [str(p) for p in Path.home().glob(".pyenv/versions/3.1?.*/bin/python3") if p.exists()]
    return sorted({p for p in found if shutil.which(p)})


@pytest.mark.parametrize("python", pythons())
def test_where_the_interpreter_lock_is(python: str, watch: Watch) -> None:
    """A timed wait of a thread of any build lies where the facts say the lock is."""
    code = (
        "import sys, threading\n"
        "def burn():\n    while True: sum(range(1000))\n"
        "print(flush=True); sys.stdin.readline()\n"
        "for _ in range(2): threading.Thread(target=burn, daemon=True).start()\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        w = watch("futex")
        w.watch(child.pid)
        fact = LockFacts().read(child.pid)
        assert fact.gil_end > fact.gil_start, fact.note
        child.stdin.write("\n")
        child.stdin.flush()
        w.wait(lambda: len(w.rows("futex_wait", tgid=child.pid)) >= 23, "waits for the interpreter lock")
        rows = w.rows("futex_wait", tgid=child.pid)
        timed = rows[(rows["aux"] & 0x100) != 0]
        inside = (timed["uaddr"] >= fact.gil_start) & (timed["uaddr"] < fact.gil_end)
        assert inside.mean() > 0.9
        child.kill()
