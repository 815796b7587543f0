"""Marks: what a process says through the real marker arrives whole, in order, with the kernel's time and thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from whyspan.config import Target, Targets
from whyspan.discovery import Discovery
from whyspan.marks import MAX_BODY, Aborted, Hello, Mark, Step
from whyspan.model import Batch
from whyspan.pipeline.source import LiveSource
from whyspan_probes.registry import Found

from tests import build_inproc
from tests.bpf.child import Child
from tests.bpf.conftest import Spawn
from tests.bpf.stubs import stub

pytestmark = pytest.mark.bpf

HELLO, STEP, EXECUTED, ABORTED, SPAN_ON = 1, 6, 8, 10, 12
Live = Callable[..., LiveSource]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The marker of ``whyspan_inproc``, built as for a checkout."""
    folder = tmp_path_factory.mktemp("real") / "whyspan_inproc"
    folder.mkdir()
    return str(build_inproc.build(folder))


@pytest.fixture
def live(probes: dict[str, Found]) -> Iterator[Live]:
    """``live(child, ...)`` watches these processes with the probes ``marker`` and ``sched``."""
    sources: list[LiveSource] = []

    def start(*children: Child) -> LiveSource:
        targets = Targets(auto=False, match=tuple(Target(pid=c.tgid) for c in children))
        found = [probes["marker"], probes["sched"]]
        sources.append(LiveSource(found, Discovery(targets), ring_bytes=4 << 20, header_allow=[]))
        return sources[-1]

    yield start
    for source in sources:
        source.close()


def loaded(spawn: Spawn, path: str) -> Child:
    child = spawn("marker")
    child.run(["load", path])
    return child


def gathered(*batches: Batch) -> tuple[list[Mark], dict[str, int]]:
    """The marks of some batches, and what was lost of marks, by name."""
    lost: dict[str, int] = {}
    for name, n in (item for b in batches for item in b.lost.items() if "mark" in item[0]):
        lost[name] = lost.get(name, 0) + n
    return [m for b in batches for m in b.marks], lost


def test_a_mark_of_the_real_marker(live: Live, spawn: Spawn, real: str) -> None:
    child = loaded(spawn, real)
    source = live(child)
    (state,) = (p.state for p in source.session.probes if p.probe.name == "marker")
    assert (state.state, state.files[0].path) == ("attached", real)
    source.drain()
    done = child.run(["mark", HELLO, [json.dumps({"engine": "vllm", "role": "core"})]])
    (mark,), lost = gathered(source.drain())
    assert lost == {}
    assert mark.body == Hello(engine="vllm", role="core")
    assert (mark.tid, mark.tgid) == (child.tgid, child.tgid)
    assert done["begin_ns"] < mark.ts_ns < done["end_ns"]
    assert done["watchers"] == 1


def test_every_size_arrives_whole_and_in_order(live: Live, spawn: Spawn, real: str) -> None:
    child = loaded(spawn, real)
    source = live(child)
    # Around each size of record, and the longest.
    lengths = [n + d for n in (256, 512, 1024, 2048, 4096) for d in (-1, 0, 1)] + [MAX_BODY - 1, MAX_BODY]
    texts = []
    for i, length in enumerate(lengths):
        head = f'{{"side":"core","numbers":[{i}]'
        texts.append(head + " " * (length - len(head) - 1) + "}")
    assert [len(t) for t in texts] == lengths
    child.run(["mark", ABORTED, texts])
    marks, lost = gathered(source.drain())
    assert lost == {}
    assert [m.body for m in marks] == [Aborted(side="core", numbers=[i]) for i in range(len(lengths))]
    assert all(a.ts_ns <= b.ts_ns for a, b in pairwise(marks))


def test_sent_is_received_and_lost(live: Live, spawn: Spawn, real: str) -> None:
    child = loaded(spawn, real)
    source = live(child)
    text = json.dumps({"step": 1, "begin_ns": 0, "end_ns": 0, "decodes": list(range(700))})
    sent = 1009
    child.run(["mark", STEP, [text] * sent])
    marks, lost = gathered(source.drain(), source.drain())
    assert 2048 < len(text) <= 4096
    assert set(lost) == {"mark"}  # a megabyte holds some 250 of them
    assert len(marks) + lost["mark"] == sent
    assert 200 < len(marks) < 300
    assert all(isinstance(m.body, Step) for m in marks)
    child.run(["mark", STEP, [text] * 23])  # the ring goes on after it was full
    marks, lost = gathered(source.drain())
    assert (len(marks), lost) == (23, {})


def test_a_reader_that_waits_is_woken_before_the_ring_is_full(live: Live, spawn: Spawn, real: str) -> None:
    child = loaded(spawn, real)
    source = live(child)
    text = json.dumps({"step": 1, "begin_ns": 0, "end_ns": 0, "decodes": list(range(700))})
    source.drain()
    child.run(["mark", STEP, [text] * 113])  # 480 kB: more than a quarter
    assert source.session.wait(0.0)
    marks, lost = gathered(source.drain())
    assert (len(marks), lost) == (113, {})


def test_what_does_not_pass_is_counted_and_harms_nothing(live: Live, spawn: Spawn, tmp_path: Path) -> None:
    child = loaded(spawn, str(stub(tmp_path)))  # the real one refuses some of this itself
    source = live(child)
    bad = [
        (4242, "{}"),  # no such kind
        (HELLO, "{"),
        (HELLO, "\udc80".encode("utf-8", "surrogateescape").decode("latin-1")),
        (HELLO, "{}"),  # no engine
        (EXECUTED, '{"step":-1,"begin_ns":0}'),
        (SPAN_ON, '{"trace_id":"x","span_id":"y"}'),
        (HELLO, ""),
    ]
    for kind, text in bad:
        child.run(["mark", kind, [text]])
    child.run(["lie", HELLO, "{}", MAX_BODY + 1])  # not carried at all
    child.run(["lie", HELLO, "{}", 0xFFFFFFFF])
    child.run(["nowhere", HELLO, 100])
    child.run(["mark", HELLO, ['{"engine":"e"}']])
    marks, lost = gathered(source.drain())
    assert [m.body for m in marks] == [Hello(engine="e")]
    assert lost == {"bad_mark": len(bad), "mark": 3}


def test_only_the_watched_are_heard(live: Live, spawn: Spawn, real: str) -> None:
    child, stranger = loaded(spawn, real), loaded(spawn, real)
    source = live(child)
    for c in (stranger, child):
        c.run(["mark", HELLO, [json.dumps({"engine": str(c.tgid)})]])
    marks, lost = gathered(source.drain())
    assert [m.body for m in marks] == [Hello(engine=str(child.tgid))]
    assert lost == {}


def test_a_library_mapped_while_it_runs(live: Live, spawn: Spawn, real: str) -> None:
    child = spawn("marker")
    source = live(child)
    source.drain()
    child.run(["load", real])
    heard: list[Mark] = []
    for _ in range(400):
        source.wait(0.05)
        child.run(["mark", HELLO, ['{"engine":"e"}']])
        heard += source.drain().marks
        if heard:
            break
    assert heard
    assert heard[0].body == Hello(engine="e")


def test_marks_and_events_have_one_clock(live: Live, spawn: Spawn, real: str) -> None:
    child = loaded(spawn, real)
    source = live(child)
    child.run(["mark", HELLO, ['{"engine":"e"}'] * 7])
    batch = source.drain()
    outs = source.schema.select(batch.events, "sched_switch_out")
    times = outs[outs["tid"] == child.tgid]["ts_ns"]
    # It waited for its input before, and again after its marks.
    assert len(batch.marks) == 7
    assert times[0] < batch.marks[0].ts_ns or times[-1] > batch.marks[-1].ts_ns
    assert batch.marks[-1].ts_ns < batch.now_ns
