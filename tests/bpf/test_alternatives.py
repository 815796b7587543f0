"""Every hook by each of its alternatives in turn, on the same work with known counts: the same records.

What each attached and counted goes to the file that ``WHYSPAN_VM_REPORT`` names, as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whyspan_probes.features import HookTable
from whyspan_probes.registry import Found, discover

from tests.bpf.alternatives import Row, alternatives, forced, is_the_kernels, write_report
from tests.bpf.conftest import Spawn
from tests.bpf.disk import disk_of
from tests.bpf.http import Http, reading, writing
from tests.bpf.watcher import Watcher
from tests.bpf.work_calls import MANY

pytestmark = pytest.mark.bpf

#: Every record and no other state than any: what is counted is all that happened.
CONFIG = {"descriptors": {"quiet_us": 0}, "power": {"deep_state": 0}}
CASES = [(f.probe.name, n) for f in discover() for n in range(alternatives(f))]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Counts:
    """What a workload's records said, by hook, beside what they must."""

    def __init__(self, w: Watcher, used: dict[str, list[str]], spawn: Spawn, folder: Path) -> None:
        self.w, self.used, self.spawn, self.folder = w, used, spawn, folder
        self.seen: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, dict[str, Any]] = {}

    def tell(self, hook: str, what: str, seen: object, expected: object) -> None:
        if self.used.get(hook):
            self.seen.setdefault(hook, {})[what] = seen
            self.expected.setdefault(hook, {})[what] = expected

    def done(self, name: str, *arguments: object) -> tuple[Any, Any]:
        """Have a watched child work; return it and what it said."""
        child = self.spawn(name, *arguments)
        self.w.watch(child.tgid)
        return child, child.run()


def block_io(c: Counts) -> None:
    if disk_of(c.folder) is None:
        return
    child, span = c.done("direct_writes", c.folder / "direct", 31)
    rows = c.w.rows("block_done", tid=child.tgid, bytes=4096)
    rows = rows[(rows["issue_ns"] >= span["begin_ns"]) & (rows["aux"] & 1 != 0)]
    c.tell("requests", "writes", len(rows), 31)


def descriptors(c: Counts) -> None:
    names = {43: "accept", 288: "accept4", 41: "socket", 257: "openat", 293: "pipe2", 290: "eventfd2"}
    names[291] = "epoll_create1"
    child, said = c.done("refusals", 23)
    for nr, failed in said["failed"]:
        rows = c.w.rows("descriptor_refused", tgid=child.tgid, syscall_nr=nr, aux=24)
        c.tell(names[nr], "refused", [failed, len(rows), int(rows["times"].sum())], [23] * 3)


def edges(c: Counts) -> None:
    """Each call in its order, by descriptor, number and bytes; writes begin before the reads that they cause."""
    for kind, sizes in (("pipe", 8), ("eventfd", 8)):
        child, said = c.done("edges", kind, 29)
        rows = [c.w.rows(n, tid=child.tgid) for n in ("edge_write", "edge_read")]
        ends = (child.facts["writer"], child.facts["reader"])  # its own input and output are pipes too
        rows = [
            r[(r["ts_ns"] >= said["begin_ns"]) & (r["fd"] == fd)] for r, fd in zip(rows, ends, strict=True)
        ]
        calls = [[(int(r["syscall_nr"]), int(r["fd"]), int(r["bytes"])) for r in part] for part in rows]
        writer, reader = ends
        vectored = kind == "pipe"
        whole = [(20 if i % 2 and vectored else 1, writer, sizes) for i in range(29)]
        back = [(19 if i % 3 == 2 else 0, reader, sizes) for i in range(29)]
        for hook, nrs in (("write", {1}), ("read", {0}), ("vectors", {19, 20})):
            got = [[x for x in part if x[0] in nrs] for part in calls]
            must = [[x for x in part if x[0] in nrs] for part in (whole, back)]
            c.tell(hook, kind, got, must)
        if all(c.used.get(h) for h in ("write", "read", "vectors")):
            spans = list(zip(said["spans"], *(part["ts_ns"].tolist() for part in rows), strict=False))
            right = sum(a <= w <= b and r <= e for (a, b, e), w, r in spans)
            c.tell("write", f"{kind}, stamped within its call", right, 29)
            c.tell("write", f"{kind}, one key", len({*rows[0]["key"].tolist(), *rows[1]["key"].tolist()}), 1)


def sockets(c: Counts) -> None:
    """Each transfer in its order; streams without gap or overlap; requests with their answers."""
    child, said = c.done("socket_calls", 3)
    parts = [c.w.rows(n, tid=child.facts["tid"]) for n in ("sock_send", "sock_recv")]
    rows = [
        (int(r["ts_ns"]), way, r) for way, part in zip(("send", "recv"), parts, strict=True) for r in part
    ]
    rows.sort(key=lambda row: row[0])
    got = [(way, int(r["aux"]), int(r["bytes"])) for _, way, r in rows]
    by_call = any(s.startswith("tracepoint/") for s in c.used.get("data", []))
    must = [(way, family, n) for way, family, n, how in said["moved"] if not (by_call and how == MANY)]
    c.tell("data", "transfers", got[: len(must)], must)
    c.tell("data", "transfers, how many", min(len(got), len(must)), len(must))
    pages = HookTable()
    unseen = not pages.missing("fentry/inet_sendpage") and any(
        "inet_recvmsg" in s for s in c.used.get("data", [])
    )
    pages.close()
    unseen = unseen and not any("sendpage" in s for s in c.used["data"])
    c.tell("data", "sendfile", sum(n for _, _, n in got[len(must) :]), 0 if unseen else said["sendfile"])
    if not by_call:
        for part in parts:
            for key in np.unique(part["key"]):
                one = part[part["key"] == key]
                one = one[: len(one) - (unseen is True)]
                ends = (one["offset"] + one["bytes"]) & 0xFFFFFFFF
                c.tell("data", f"gaps of {key:x}"[:4], int((ends[:-1] != one["offset"][1:]).sum()), 0)
    server = c.spawn("scripted_server")
    http = Http(c.w, server)
    waited = 0
    for i in range(7):
        text = b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: %d\r\nContent-Length: 3\r\n\r\nabc" % i
        seen = http.talk(text, [["pause", 0.05], reading(len(text)), writing(OK)])
        c.tell("data", f"request {i}", seen.requests, [(0, "POST", "/v1/completions")])
        c.tell("data", f"response {i}", [tuple(e) for e in seen.ends], [(0, 200, 1, 5, 0)])
        # Without data no connection is known to be anybody's.
        c.tell("state", f"closed {i}", 7 in seen.states["new_state"].tolist(), bool(c.used.get("data")))
        waited += sum(h.first_ns < h.recv_ns for h in seen.heads)
    if c.used.get("data"):
        # All but the first, by which the port is learnt to be a server's.
        c.tell("arrival", "requests that began on arrival", waited, 6)


def stalls(c: Counts) -> None:
    child, said = c.done("nagle", 13, 0)
    held = c.w.rows("sock_held", tgid=child.tgid)
    c.tell("data", "held", len(held), said["delayed"])
    child, _ = c.done("dns", 11)
    rows = c.w.rows("dns_message", tgid=child.tgid)
    c.tell("data", "dns", [int((rows["aux"] & bit != 0).sum()) for bit in (1, 2)], [11, 10])


def tcp(c: Counts) -> None:
    for version in ("4", "6"):
        child, _ = c.done("connects", version, 13)
        c.tell("state", f"connects {version}", c.w.count("tcp_connect", tgid=child.tgid), 14)
    child, _ = c.done("crowd", 5, 2)
    queue = c.w.rows("accept_queue", lport=child.facts["port"])
    c.tell("listen", "full queues", [int(queue["limit"].max(initial=0)), len(queue) > 0], [2, True])


def sched(c: Counts) -> None:
    child, _ = c.done("sleeps", 23)
    c.tell("switch", "sleeps", c.w.count("sched_switch_out", tid=child.tgid, syscall_nr=230), 23)
    child, _ = c.done("futex", 17)
    wakes = c.w.rows("sched_wake", tid=child.facts["waiter"], waker_tid=child.facts["waker"])
    c.tell("waking", "wake-ups by futex", int((wakes["waker_nr"] == 202).sum()) >= 17, True)
    child, said = c.done("programs", 5, 7)
    c.tell("life", "forks", c.w.rows("sched_fork", tgid=child.tgid)["child_tgid"].tolist(), said["pids"])
    c.tell("life", "programs", sum(c.w.count("sched_exec", tgid=pid) for pid in said["pids"]), 5)


def fds(c: Counts) -> None:
    child, _ = c.done("blocked_pipe")
    rows = c.w.rows("fd_block", tid=child.tgid)
    blocks = [[child.facts["writer"], 1], [child.facts["reader"], 0]]
    got = [[int(r["fd"]), int(r["syscall_nr"])] for r in rows if r["fd"] not in {0, 1}]  # else its own input
    c.tell("switch", "blocks", got, blocks)


def futex(c: Counts) -> None:
    child, _ = c.done("futex", 17)
    rows = c.w.rows("futex_wait", tid=child.facts["waiter"], uaddr=child.facts["address"])
    c.tell("switch", "waits", len(rows), 17)


WORK: dict[str, Callable[[Counts], None]] = {
    f.__name__: f for f in (block_io, descriptors, edges, sockets, stalls, tcp, sched, fds, futex)
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.parametrize("case", CASES, ids=[f"{name}-{n}" for name, n in CASES])
def test_alternatives_see_the_same(
    case: tuple[str, int], probes: dict[str, Found], rows: list[Row], spawn: Spawn, tmp_path: Path
) -> None:
    name, n = case
    found = probes[name]
    hooks = [h for h in found.probe.hooks if n < len(h.alternatives)]
    config = {name: CONFIG[name]} if name in CONFIG else {}
    w = Watcher([forced(found, n)], config=config, may_fail=True)
    try:
        state = w.states[name]
        mine = [Row(name, h.name, n, state.hooks[h.name].used, bool(state.hooks[h.name].used)) for h in hooks]
        for row in mine:
            row.reason = "; ".join(state.hooks[row.hook].refused)
            rows.append(row)
            assert row.attached or is_the_kernels(row.reason), f"{row.hook}: {row.reason}"
        counts = Counts(w, {h: s.used for h, s in state.hooks.items()}, spawn, tmp_path)
        if name in WORK and any(row.attached for row in mine):
            WORK[name](counts)
        for row in mine:
            row.seen, row.expected = counts.seen.get(row.hook, {}), counts.expected.get(row.hook, {})
        for row in mine:
            assert row.seen == row.expected, f"{row.hook} by {row.sections}"
        assert w.dropped() == 0
    finally:
        w.close()
        write_report(rows)  # each time: a guest may be given up
    if not any(row.attached for row in mine):
        pytest.skip("; ".join(f"{row.hook}: {row.reason}" for row in mine))


def test_returns_that_the_kernel_does_not_follow_are_counted(probes: dict[str, Found], spawn: Spawn) -> None:
    by_kprobes = next(
        i for i, a in enumerate(probes["edges"].probe.hooks[1].alternatives) if "ksyscall" in a[-1]
    )
    w = Watcher([forced(probes["edges"], by_kprobes)], may_fail=True)
    try:
        hook = w.states["edges"].hooks["read"]
        if not hook.used:
            pytest.skip("; ".join(hook.refused))
        assert hook.lacks
        child = spawn("waiting_reads", 31)
        w.watch(child.tgid)
        child.run()
        reads, lost = w.count("edge_read", tgid=child.tgid), sum(w.drops("edge_read"))
        assert reads + lost == 2 * 31
        assert lost > 0
        missed = w.session.probes[0].link_misses()
        assert missed == 0 or missed >= lost  # 0: before 6.7 the kernel does not say
    finally:
        w.close()
