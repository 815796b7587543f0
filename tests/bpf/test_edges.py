"""edges: who wrote what another read, through eventfds and pipes, with prime counts."""

from __future__ import annotations

import pytest

from tests.bpf.conftest import Spawn, Watch

pytestmark = pytest.mark.bpf

TYPE = {"eventfd": 1, "pipe": 2}


@pytest.mark.parametrize("kind", ["eventfd", "pipe"])
def test_writes_and_reads_are_counted_keyed_and_stamped(watch: Watch, spawn: Spawn, kind: str) -> None:
    w, child = watch("edges"), spawn("edges", kind, 101)
    w.watch(child.tgid)
    result = child.run()
    assert result["failed"] == 1
    writes = w.rows("edge_write", tid=child.tgid, fd=child.facts["writer"], aux=TYPE[kind])
    reads = w.rows("edge_read", tid=child.tgid, fd=child.facts["reader"], aux=TYPE[kind])
    writes, reads = (rows[rows["ts_ns"] >= result["begin_ns"]] for rows in (writes, reads))
    assert (len(writes), len(reads)) == (101, 101)
    assert set(writes["key"].tolist()) == set(reads["key"].tolist())
    assert len(set(writes["key"].tolist())) == 1
    assert writes["key"][0] != 0
    assert (writes["bytes"] == 8).all()
    assert (reads["bytes"] == 8).all()
    for write, read, (before_ns, between_ns, after_ns) in zip(writes, reads, result["spans"], strict=True):
        # At entry, and for its whole duration, within what the caller saw.
        assert before_ns <= write["ts_ns"]
        assert write["ts_ns"] + write["duration_ns"] <= between_ns
        # At exit: never before the write that fed it.
        assert between_ns <= read["ts_ns"] <= after_ns
        assert write["ts_ns"] < read["ts_ns"]
    numbers = set(writes["syscall_nr"].tolist())
    assert numbers == ({1} if kind == "eventfd" else {1, 20})
    assert set(reads["syscall_nr"].tolist()) == {0, 19}


def test_a_failed_write_to_a_pipe_is_not_reported(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("edges"), spawn("edges", "pipe", 1)
    w.watch(child.tgid)
    result = child.run()
    assert result["failed"] == 1
    rows = w.rows("edge_write", tid=child.tgid, fd=child.facts["writer"])
    early = rows[rows["ts_ns"] < result["begin_ns"]]
    # What filled it succeeded; the write after that did not.
    assert (early["bytes"] > 0).all()
    assert int(early["bytes"].sum()) == 65536


def test_a_write_to_an_eventfd_is_reported_at_its_entry(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("edges"), spawn("edges", "eventfd", 1)
    w.watch(child.tgid)
    result = child.run()
    rows = w.rows("edge_write", tid=child.tgid, fd=child.facts["writer"])
    assert (rows["duration_ns"] == 0).all()
    # So one that fails, for a counter that is full, is reported too.
    assert result["failed"] == 1
    assert len(rows[rows["ts_ns"] < result["begin_ns"]]) == 2


def test_pipes_can_be_left_out(watch: Watch, spawn: Spawn) -> None:
    w = watch("edges", config={"edges": {"pipes": 0}})
    pipe, eventfd = spawn("edges", "pipe", 13), spawn("edges", "eventfd", 13)
    w.watch(pipe.tgid, eventfd.tgid)
    pipe.run()
    eventfd.run()
    assert w.count("edge_write", tgid=pipe.tgid) == 0
    assert w.count("edge_read", tgid=pipe.tgid) == 0
    assert w.count("edge_read", tgid=eventfd.tgid) == 14
