"""``memory.cgroup_limit`` and ``memory.oom`` on a real server in a memory cgroup of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bpf.daemon import Daemon
from tests.bpf.memory_group import Group, memory_group
from tests.bpf.waiting import until
from tests.demo.procs import ROOT, DemoError
from tests.faults.host import zram

pytestmark = pytest.mark.bpf

LIMIT = 96 << 20
REQUESTS = 17


@contextlib.contextmanager
def served(folder: Path, group: Group) -> Iterator[tuple[subprocess.Popen[bytes], int, Daemon]]:
    """A server in the group, its port, and the agent beside it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bpf.memory_server"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        preexec_fn=group.join,  # noqa: PLW1509
    )
    daemon: Daemon | None = None
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        daemon = Daemon(folder, server.pid)
        daemon.wait_ready()
        yield server, port, daemon
    finally:
        if daemon:
            daemon.kill()
        server.kill()
        server.wait()


def get(port: int, route: str) -> int:
    """Return the status of a request, 0 when there was no answer."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request("GET", route)
        answer = client.getresponse()
        answer.read()
        return answer.status
    except (http.client.HTTPException, OSError):
        return 0
    finally:
        client.close()


def failed(daemon: Daemon, count: int) -> list[dict[str, Any]]:
    """Return the findings on failed requests once there are so many."""
    seen: list[dict[str, Any]] = []

    def found() -> bool:
        seen[:] = [f for f in daemon.findings() if f["outcome"] != "ok"]
        return len(seen) == count

    until(found, "the failed requests are stored", every_s=0.3)
    return seen


def sentence(daemon: Daemon, finding: dict[str, Any]) -> str:
    """Return what ``explain`` says of a request."""
    shown = json.loads(daemon.output("explain", finding["trace_id"], "--json"))
    return str(shown["verdict"]["sentence"])


def test_reclaim_at_the_limit_is_the_cause_and_names_the_cgroup(tmp_path: Path) -> None:
    with contextlib.ExitStack() as undo:
        try:
            undo.enter_context(zram.swap(256))
        except DemoError as e:
            pytest.skip(str(e))
        group = undo.enter_context(memory_group("limit", LIMIT))
        _, port, daemon = undo.enter_context(served(tmp_path, group))
        verdicts = daemon.verdicts(port, "/v1/keep/16", REQUESTS)
        named = [v for v in verdicts if v["cause"] == "memory.cgroup_limit"]
        # The first few fill the memory that is left.
        assert len(named) >= REQUESTS - 6, [v["cause"] for v in verdicts]
        for v in named:
            assert (v["culprit"]["kind"], v["culprit"]["name"]) == ("cgroup", group.path)
            assert "limit 96 MiB" in v["culprit"]["detail"]


def test_requests_end_with_their_process_or_with_its_child(tmp_path: Path) -> None:
    with memory_group("killed", LIMIT) as group, served(tmp_path, group) as (server, port, daemon):
        assert [get(port, "/v1/ok") for _ in range(3)] == [200] * 3
        assert [get(port, "/v1/child") for _ in range(5)] == [500] * 5
        for f in failed(daemon, 5):
            v = f["verdict"]
            assert (v["cause"], v["culprit"]["kind"]) == ("memory.oom", "process"), v
            assert v["culprit"]["tgid"] not in (0, server.pid)
            told = sentence(daemon, f)
            assert "out-of-memory killer chose process" in told
            assert group.path in told
            assert "limit 96 MiB" in told
        assert get(port, "/v1/die") == 0
        assert server.wait() == -9
        (last,) = [f for f in failed(daemon, 6) if f["outcome"] == "killed"]
        v = last["verdict"]
        assert (v["cause"], v["culprit"]["tgid"]) == ("memory.oom", server.pid)
        assert "the out-of-memory killer chose it" in sentence(daemon, last)
        assert group.kills() == 6


def test_a_kill_by_hand_is_none(tmp_path: Path) -> None:
    with memory_group("hand", LIMIT) as group, served(tmp_path, group) as (server, port, daemon):
        assert get(port, "/v1/ok") == 200
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.connect()
        assert client.sock is not None
        client.sock.sendall(b"GET /v1/ok HTTP/1.1\r\nHost: x\r\n")  # goes on: the server waits for the rest
        until(lambda: "sock" if _reads(server.pid) else "", "the server reads it")
        server.kill()
        server.wait()
        client.close()
        (f,) = failed(daemon, 1)
        assert f["verdict"]["cause"] != "memory.oom", f["verdict"]
        assert group.kills() == 0


def _reads(pid: int) -> bool:
    """Whether the server waits in recvfrom for the rest of a head."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == "45"
