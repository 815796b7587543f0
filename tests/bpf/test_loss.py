"""No record is lost unseen: what was sent is what was received and what was counted as dropped."""

from __future__ import annotations

import mmap

import pytest

from tests.bpf.conftest import Spawn, Watch

pytestmark = pytest.mark.bpf

WRITES = 1009
NO_PIPES = {"edges": {"pipes": 0}}  # the test talks to its children through pipes
RECORDS_PER_PAGE = mmap.PAGESIZE // 64 - 1  # a full ring keeps one byte free, hence one record


def test_sent_is_received_plus_dropped_with_a_stopped_reader(watch: Watch, spawn: Spawn) -> None:
    w = watch("edges", ring_bytes=2 * mmap.PAGESIZE, config=NO_PIPES)
    assert {ring._ring.size for ring in w.session.maps.rings} == {mmap.PAGESIZE}
    children = {cpu: spawn("numbered_writes", WRITES, cpu=cpu) for cpu in (0, 1)}
    w.watch(*(c.tgid for c in children.values()))
    for child in children.values():
        child.run()
    received = {
        cpu: w.count("edge_write", tid=child.tgid, cpu=cpu, fd=child.facts["fd"])
        for cpu, child in children.items()
    }
    drops = w.drops("edge_write")
    for cpu in children:
        assert received[cpu] == RECORDS_PER_PAGE  # two CPUs, two rings
        assert drops[cpu] == WRITES - RECORDS_PER_PAGE
    assert sum(drops) == w.dropped() == sum(drops[cpu] for cpu in children)


def test_the_ring_goes_on_after_it_was_full(watch: Watch, spawn: Spawn) -> None:
    w = watch("edges", ring_bytes=2 * mmap.PAGESIZE, config=NO_PIPES)
    child = spawn("numbered_writes", WRITES, 23, cpu=0)
    w.watch(child.tgid)
    child.run()
    first = w.count("edge_write", tid=child.tgid)
    dropped = w.dropped()
    child.run()  # 23 more, in an empty ring
    assert w.count("edge_write", tid=child.tgid, fd=child.facts["fd"]) == first + 23
    assert w.dropped() == dropped


def test_nothing_is_lost_in_rings_of_the_usual_size(watch: Watch, spawn: Spawn) -> None:
    w = watch("edges", "sched", "fds", "sockets", "block_io", ring_bytes=8 << 20)
    child, stream = spawn("numbered_writes", 20_011), spawn("unix_stream", 11, 101)
    w.watch(child.tgid, stream.tgid)
    child.run()
    stream.run()
    assert w.count("edge_write", tid=child.tgid, fd=child.facts["fd"]) == 20_011
    assert w.count("sock_send", tid=stream.tgid) == 2 * 11 * 101
    assert w.count("sock_recv", tid=stream.tgid) == 3 * 11 * 101
    assert w.dropped() == 0


def test_all_kinds_together_reconcile(watch: Watch, spawn: Spawn) -> None:
    w = watch("edges", "sockets", ring_bytes=2 * mmap.PAGESIZE)
    stream = spawn("unix_stream", 13, 31)
    w.watch(stream.tgid)
    stream.run()
    for kind, sent in (("sock_send", 2 * 13 * 31), ("sock_recv", 3 * 13 * 31)):
        assert w.count(kind, tid=stream.tgid) + sum(w.drops(kind)) == sent
    assert w.dropped() > 0
