"""fds: what a blocked call's descriptor was on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.bpf.conftest import Spawn, Watch

pytestmark = pytest.mark.bpf

FILE, PIPE, SOCKET = 1, 3, 4
NR_READ, NR_WRITE, NR_POLL, NR_RECVFROM, NR_FSYNC = 0, 1, 7, 45, 74


def test_pipes(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("fds", "sched", "edges"), spawn("blocked_pipe")
    w.watch(child.tgid)
    child.run()
    facts = child.facts
    (write,) = w.rows("fd_block", tid=child.tgid, syscall_nr=NR_WRITE, fd=facts["writer"])
    (read,) = w.rows("fd_block", tid=child.tgid, syscall_nr=NR_READ, fd=facts["reader"])
    assert (write["aux"], write["inode"]) == (PIPE, facts["written_inode"])
    assert (read["aux"], read["inode"]) == (PIPE, facts["read_inode"])
    # The same key as in the edges: it leads to who wrote.
    assert read["key"] in set(w.rows("edge_write", tgid=child.tgid)["key"].tolist())
    # Beside its switch: after the switch-in before it, before the one after.
    (out,) = w.rows("sched_switch_out", tid=child.tgid, syscall_nr=NR_READ, arg0=facts["reader"])
    ins = w.rows("sched_switch_in", tid=child.tgid)["ts_ns"]
    assert not ((ins > min(out["ts_ns"], read["ts_ns"])) & (ins < max(out["ts_ns"], read["ts_ns"]))).any()


def test_sockets_and_poll(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("fds", "sockets"), spawn("blocked_socket")
    w.watch(child.tgid)
    child.run()
    facts = child.facts
    (tcp,) = w.rows("fd_block", tid=child.tgid, syscall_nr=NR_RECVFROM, fd=facts["tcp"])
    assert (tcp["aux"], tcp["lport"], tcp["rport"]) == (SOCKET, facts["lport"], facts["rport"])
    (unix,) = w.rows("fd_block", tid=child.tgid, syscall_nr=NR_RECVFROM, fd=facts["unix"])
    assert (unix["aux"], unix["inode"]) == (SOCKET, facts["unix_inode"])
    received = w.rows("sock_recv", tid=child.tgid, aux=1)
    assert unix["key"] == received["key"][0]
    (poll,) = w.rows("fd_block", tid=child.tgid, syscall_nr=NR_POLL)
    assert (poll["fd"], poll["lport"]) == (facts["tcp"], facts["lport"])


def test_poll_can_be_left_out(watch: Watch, spawn: Spawn) -> None:
    w, child = watch("fds", config={"fds": {"poll": 0}}), spawn("blocked_socket")
    w.watch(child.tgid)
    child.run()
    assert w.count("fd_block", tid=child.tgid, syscall_nr=NR_RECVFROM) == 2
    assert w.count("fd_block", tid=child.tgid, syscall_nr=NR_POLL) == 0


def test_fsync(watch: Watch, spawn: Spawn, disk_dir: Path) -> None:
    w, child = watch("fds"), spawn("fsyncs", disk_dir / "synced", 13)
    w.watch(child.tgid)
    child.run()
    rows = w.rows("fd_block", tid=child.tgid, syscall_nr=NR_FSYNC)
    assert len(rows) >= 13  # each waits for its write at least once
    assert set(rows["aux"].tolist()) == {FILE}
    assert set(rows["fd"].tolist()) == {child.facts["fd"]}
    assert set(rows["inode"].tolist()) == {child.facts["inode"]}
    dev = child.facts["dev"]
    assert set(rows["dev"].tolist()) == {os.major(dev) << 20 | os.minor(dev)}
