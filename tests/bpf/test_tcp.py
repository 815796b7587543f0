"""tcp and stalls: what was sent again, connects, full listen queues, sends held back, holes, DNS; in a namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bpf.conftest import Spawn, Watch
from tests.faults.host.netdrop import counters, dropping

pytestmark = pytest.mark.bpf

MS = 1_000_000
TIMEOUT, SYN = 1, 4
TICK_US = 10_000  # of the kernel's clock, at most
#: TCP_DELACK_MIN, include/net/tcp.h: HZ / 25; a tick less where the clock just missed one.
DELAYED_ACK_NS = 40 * MS
ECONNREFUSED = 111


@pytest.mark.parametrize(("version", "count"), [("4", 13), ("6", 11)])
def test_connects(watch: Watch, spawn: Spawn, version: str, count: int) -> None:
    w, child = watch("tcp", "stalls"), spawn("connects", version, count)
    w.watch(child.tgid)
    ports = child.run()["ports"]
    good = w.rows("tcp_connect", tgid=child.tgid, rport=child.facts["port"])
    assert good["lport"].tolist() == ports
    assert set(good["tid"].tolist()) == {child.tgid}
    assert set(good["failed"].tolist()) == set(good["again"].tolist()) == set(good["error"].tolist()) == {0}
    assert set(good["aux"].tolist()) == {1}  # on this host
    assert len(set(good["cookie"].tolist())) == count
    (refused,) = w.rows("tcp_connect", tgid=child.tgid, rport=child.facts["refused"])
    assert (refused["failed"], refused["error"]) == (1, ECONNREFUSED)
    assert w.count("tcp_connect", tgid=child.tgid) == count + 1
    assert w.count("tcp_retransmit", lport=child.facts["port"]) == 0


def test_connects_of_others_are_not_recorded(watch: Watch, spawn: Spawn) -> None:
    w, child, other = watch("tcp"), spawn("connects", "4", 3), spawn("connects", "4", 5)
    w.watch(child.tgid)
    other.run()
    child.run()
    assert w.count("tcp_connect") == 4
    assert w.count("tcp_connect", tgid=child.tgid) == 4


def test_retransmits_are_those_that_the_namespace_counted(watch: Watch, spawn: Spawn, tmp_path: Path) -> None:
    w, child = watch("tcp", "stalls"), spawn("transfer", 3_000_017)
    w.watch(child.tgid)
    port, near = child.facts["port"], child.facts["near"]
    with dropping(child.tgid, tmp_path, port, percent=17):
        counted = child.run(timeout_s=60)["retransmits"]
    again = w.rows("tcp_retransmit", lport=near, rport=port)
    # The kernel counts segments, and sends several of them again at once.
    assert counted > 0
    assert 0 < len(again) <= counted == int(again["total"].max())
    holes = w.rows("sock_hole", tgid=child.tgid, lport=port, rport=near)
    assert len(holes) > 0
    assert int(holes["packets"].sum()) == int(holes["total"].max())
    assert w.dropped() == 0


def test_a_time_out_says_how_long_it_was(watch: Watch, spawn: Spawn, tmp_path: Path) -> None:
    w, child = watch("tcp", "sockets"), spawn("transfer", 1009)
    w.watch(child.tgid)
    near = child.facts["near"]
    with dropping(child.tgid, tmp_path, child.facts["port"], percent=100):
        child.say()
        w.wait(lambda: w.count("tcp_retransmit", lport=near, aux=TIMEOUT) >= 2, "two time-outs")
    child.answer()
    rows = w.rows("tcp_retransmit", lport=near, aux=TIMEOUT)
    assert rows["timeouts"].tolist() == [i + 1 for i in range(len(rows))]
    assert set(rows["state"].tolist()) == {1}
    assert len(set(rows["seq"].tolist())) == 1
    assert rows["rto_us"][0] >= 200_000  # TCP_RTO_MIN
    assert rows["rto_us"][1] == 2 * rows["rto_us"][0]
    passed_us = int(rows["ts_ns"][1] - rows["ts_ns"][0]) / 1000
    assert passed_us > int(rows["rto_us"][1]) - TICK_US
    # Its place in the stream is that of the send.
    (sent,) = w.rows("sock_send", tgid=child.tgid, lport=near)
    assert (sent["offset"], sent["bytes"]) == (rows["seq"][0], 1009)


def test_a_lost_syn(watch: Watch, spawn: Spawn, tmp_path: Path) -> None:
    w, child = watch("tcp"), spawn("one_syn")
    w.watch(child.tgid)
    with dropping(child.tgid, tmp_path, child.facts["port"], syns=1):
        child.run()
    (connect,) = w.rows("tcp_connect", tgid=child.tgid, rport=child.facts["port"])
    assert connect["again"] == 1
    assert connect["duration_ns"] > 900 * MS
    (again,) = w.rows("tcp_retransmit", rport=child.facts["port"])
    assert (again["aux"], again["state"], again["rto_us"]) == (SYN, 2, 1_000_000)
    assert again["cookie"] == connect["cookie"]


def test_tails_held_by_nagles_algorithm(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("stalls"), spawn("nagle", 7, 0)
    w.watch(child.tgid)
    delayed = child.run()["delayed"]
    held = w.rows("sock_held", tgid=child.tgid, rport=child.facts["port"])
    assert len(held) == 7
    assert set(held["bytes"].tolist()) == {1}
    took = (held["left_ns"] - held["held_ns"]).astype(int)
    assert delayed > 0
    assert (took > DELAYED_ACK_NS - 12 * MS).sum() == delayed
    assert (held["left_ns"] <= held["ts_ns"]).all()


def test_with_nodelay_nothing_is_held(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("stalls"), spawn("nagle", 7, 1)
    w.watch(child.tgid)
    assert child.run()["delayed"] == 0
    assert w.count("sock_held") == 0


def test_a_listen_queue_that_overflows(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("tcp"), spawn("crowd", 11, 3)
    w.watch(child.tgid)
    port = child.facts["port"]
    before = counters(child.tgid)["ListenOverflows"]
    said = child.run()
    full = w.rows("accept_queue", lport=port)
    assert said["connected"] == 4  # the limit and one
    assert full["backlog"].tolist() == [3, 4]
    assert set(full["limit"].tolist()) == {3}
    # The seven others' SYNs come again and again, until the children are killed.
    assert counters(child.tgid)["ListenOverflows"] - before >= 7
    w.wait(lambda: w.count("tcp_retransmit", rport=port) >= 7, "the SYNs are sent again")
    again = w.rows("tcp_retransmit", rport=port)
    assert set(again["aux"].tolist()) == {SYN}


def test_dns_messages(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("stalls"), spawn("dns", 7)
    w.watch(child.tgid)
    child.run()
    rows = w.rows("dns_message", tgid=child.tgid)
    assert (rows["aux"] & 3).tolist() == [1, 2] * 6 + [1]
    assert (rows["aux"] & 4 == 4).all()
    assert set(rows["lport"].tolist()) == {child.facts["lport"]}
    assert len(set(rows["cookie"].tolist())) == 1
    assert w.count("dns_message") == 13  # the server's own are not to port 53, the other socket's neither
