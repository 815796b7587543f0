"""Every request gets its end: who ended it, how far it was, on real connections that fail in every way."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from whyspan.facts import Facts
from whyspan.model import Batch, Request
from whyspan.requests import RequestTable
from whyspan_probes.registry import Found

from tests.bpf.child import Child
from tests.bpf.ending_cases import CASES, CHUNKED, GET, OK, Case, N, read_all
from tests.bpf.http import preferring, reading, writing
from tests.bpf.waiting import until
from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf

ESTABLISHED, TIME_WAIT, CLOSE_WAIT = 1, 6, 8


@pytest.fixture(scope="module", params=["tracepoints", "syscall exits"])
def watcher(request: pytest.FixtureRequest, probes: dict[str, Found]) -> Iterator[Watcher]:
    found = probes["sockets"]
    (data,) = (h for h in found.probe.hooks if h.name == "data")
    prefixes = [a[0].startswith("sockets_exit_") for a in data.alternatives]
    w = Watcher([preferring(found, "data", prefixes.index(request.param == "syscall exits"))])
    yield w
    w.close()


@pytest.fixture(scope="module")
def server(watcher: Watcher) -> Iterator[Child]:
    child = Child("scripted_server")
    watcher.watch(child.tgid)
    # One request makes the port known as one that serves.
    with socket.create_connection(("127.0.0.1", child.facts["port"]), timeout=20) as s:
        child.say([reading(N), writing(OK)])
        s.sendall(GET)
        read_all(s)
    child.answer()
    yield child
    child.kill()


def connections(port: int, peer: int) -> dict[int, int]:
    """Return the states that the kernel has of the server's end, by the client's port."""
    out = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state = line.split()[:4]
        if int(local.split(":")[1], 16) == port and int(remote.split(":")[1], 16) == peer:
            out[peer] = int(state, 16)
    return out


def table_of(w: Watcher, port: int, since_ns: int) -> list[Request]:
    """Return the requests that ended on the connection from the client's port."""
    w.drain()
    events = w.events[w.events["ts_ns"] >= np.uint64(since_ns)]
    events = events[np.argsort(events["ts_ns"], kind="stable")]
    heads = [h for h in w.heads if h.first_ns >= since_ns]
    facts = Facts()
    made = RequestTable(w.schema, "i")
    found = made.feed(Batch(time.monotonic_ns(), events, heads), facts) + made.flush(facts)
    states = w.schema.select(events, "sock_state")
    cookies = set(states["cookie"][states["rport"] == port].tolist()) | {
        h.cookie for h in heads if h.rport == port
    }
    assert [r for r in made.open_requests() if r.cookie in cookies] == []
    return sorted((r for r in found if r.cookie in cookies), key=lambda r: r.seq)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_every_request_gets_its_end(watcher: Watcher, server: Child, case: Case) -> None:
    since_ns, port = time.monotonic_ns(), server.facts["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = client.getsockname()[1]
        server.say(case.server)
        for act in case.client:
            act(client)
    server.answer()
    until(lambda: connections(port, peer).get(peer, TIME_WAIT) == TIME_WAIT, "the connection has ended")
    found = table_of(watcher, peer, since_ns)
    assert [(r.seq, r.status, r.outcome, r.ended_by, r.head, r.chunks) for r in found] == case.requests
    for r in found:
        assert r.start_ns <= r.end_ns <= time.monotonic_ns()
        if not case.name.startswith("half close"):  # there it may have been before the head was read
            assert (r.left_ns > 0) == (r.ended_by == "client_close")


def test_the_kernels_states_agree(watcher: Watcher, server: Child) -> None:
    # The client leaves while the server does something else: for the kernel the connection waits to be closed.
    since_ns, port = time.monotonic_ns(), server.facts["port"]
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    peer = client.getsockname()[1]
    server.say([reading(N), ["pause", 2]])
    client.sendall(GET)
    until(lambda: watcher.count("sock_recv", rport=peer) == 1, "the request is read")
    assert connections(port, peer) == {peer: ESTABLISHED}
    before_ns = time.monotonic_ns()
    client.close()
    after_ns = time.monotonic_ns()
    until(lambda: connections(port, peer) == {peer: CLOSE_WAIT}, "the server's end waits to be closed")
    server.answer()
    until(lambda: connections(port, peer) == {}, "the server has closed")
    (r,) = table_of(watcher, peer, since_ns)
    assert (r.outcome, r.ended_by) == ("reset", "client_close")
    assert before_ns <= r.left_ns <= after_ns
    assert r.end_ns - r.left_ns > 100_000_000


def test_a_server_that_is_killed(probes: dict[str, Found], watcher: Watcher) -> None:
    w = Watcher([probes["sockets"], probes["sched"]])
    child = Child("scripted_server")
    w.watch(child.tgid)
    try:
        port = child.facts["port"]
        for script in (
            [reading(N), writing(OK)],
            [reading(N), writing(CHUNKED), writing(b"1\r\na\r\n"), ["die"]],
        ):
            since_ns = time.monotonic_ns()
            with socket.create_connection(("127.0.0.1", port), timeout=20) as served:
                peer = served.getsockname()[1]
                child.say(script)
                # Nobody will read this one: the server has one connection at a time.
                waiting = socket.create_connection(("127.0.0.1", port), timeout=20)
                waiting.sendall(GET)
                served.sendall(GET)
                read_all(served)
            if script[-1] == ["die"]:
                break
            child.answer()
            child.say([reading(N)])
            child.answer()
            waiting.close()
        code = child._process.wait(20)
        assert code == -9
        w.wait(lambda: w.count("sched_exit", aux=1), "the exit is seen")
        (r,) = table_of(w, peer, since_ns)
        assert (r.outcome, r.ended_by, r.exit_code, r.status, r.chunks) == (
            "killed",
            "process_exit",
            9,
            200,
            1,
        )
        (r,) = table_of(w, waiting.getsockname()[1], since_ns)
        assert (r.head, r.outcome, r.ended_by, r.exit_code) == ("unread", "killed", "process_exit", 9)
        with pytest.raises(ConnectionResetError):
            waiting.recv(1)
        waiting.close()
    finally:
        child.kill()
        w.close()
