"""A server's loop stalls, running or blocked: all its threads are taken while it does, and stand in the finding."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from whyspan.pipeline.snapshots import PROCESS_EVERY_S

from tests.bench.ports import free_port
from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until

pytestmark = pytest.mark.bpf

SERVER = """
import asyncio, queue, sys, threading, time
idle, lock = queue.Queue(), threading.Lock()
for _ in range(3):
    threading.Thread(target=idle.get, daemon=True).start()

def keeping(seconds, kept):
    with lock:
        kept.set()
        time.sleep(seconds)

def waiting(seconds):
    kept = threading.Event()
    threading.Thread(target=keeping, args=(seconds, kept), daemon=True).start()
    kept.wait()
    with lock:
        pass

def spinning(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

async def serve(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    route = head.split()[1]
    if route == b"/spin":
        spinning(0.6)
    elif route == b"/lock":
        waiting(0.6)
    elif route == b"/rest":
        await asyncio.sleep(0.6)
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok")
    await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def explained(daemon: Daemon, count: int) -> Callable[[], bool]:
    return lambda: len(daemon.findings()) >= count


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """The findings by route."""
    folder, port = tmp_path_factory.mktemp("snapshots"), free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    daemon = Daemon(folder, server.pid, collector="budget_core_ratio = 1\nbudget_target_ratio = 1")
    try:
        daemon.wait_ready()
        if "snapshots: attached" not in daemon.log:
            pytest.skip("no iterators over the threads of one process")
        until(lambda: f"watching process {server.pid}" in daemon.log, "the server is watched")
        for n, route in enumerate(("/rest", "/spin", "/lock"), 1):
            traced = {"traceparent": f"00-{n:032x}-00000000000000ab-01"}
            with urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}{route}", headers=traced), timeout=30
            ) as response:
                assert response.read() == b"ok"
            until(explained(daemon, n), "the request is explained", every_s=0.5)
            # Of one process at most one in so many seconds.
            time.sleep(PROCESS_EVERY_S)
        out = {}
        for n, route in enumerate(("/rest", "/spin", "/lock"), 1):
            text = daemon.output("explain", f"{n:032x}", "--json")
            out[route] = json.loads(text)
            out[route]["text"] = daemon.output("explain", f"{n:032x}")
        yield out
    finally:
        daemon.kill()
        server.kill()
        server.wait()


def test_a_loop_that_waits_for_its_sockets_is_not_stalled(found: dict[str, dict[str, Any]]) -> None:
    assert not found["/rest"]["snapshots"]


@pytest.mark.parametrize(
    ("route", "states", "function"),
    [("/spin", {"running", "runnable"}, "spinning"), ("/lock", {"blocked"}, "waiting")],
)
def test_all_threads_are_told_while_the_loop_stalls(
    found: dict[str, dict[str, Any]], route: str, states: set[str], function: str
) -> None:
    (snapshot,) = found[route]["snapshots"]
    # Whoever has the lock lies on the path, too.
    stalled = {g["python"][0][0]: g for g in snapshot["groups"] if g["stalled"] and g["python"]}
    assert snapshot["groups"][0]["stalled"]
    assert set(stalled) == ({"waiting", "keeping"} if route == "/lock" else {function})
    assert stalled[function]["state"] in states
    assert 150 <= stalled[function]["for_ms"] <= 700
    pool = next(g for g in snapshot["groups"] if any(f[0] == "Queue.get" for f in g["python"]))
    assert (pool["count"], pool["state"], pool["syscall"]) == (3, "blocked", "futex")
    assert "while it stalled" in found[route]["text"]
    assert f"{function} (" in found[route]["text"]
