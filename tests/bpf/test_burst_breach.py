"""A slow request under a running agent triggers a burst of the process that its verdict names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until
from tests.demo.procs import ROOT

pytestmark = pytest.mark.bpf

BURST = """
[burst]
on_breach = ["malloc", "syscalls"]
causes = ["python"]
seconds = 1
"""


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Process and port of a server that can be told to block its event loop."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bpf.failing_server"], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())["port"]
        process.kill()


def test_it_is_measured_by_both_kinds_and_once(server: tuple[int, int], tmp_path: Path) -> None:
    tgid, port = server
    daemon = Daemon(tmp_path, tgid, collector=BURST)
    try:
        daemon.wait_ready()
        ended: list[str] = []

        def served() -> bool:
            # The event loop is blocked for the third of a second: python.loop_blocked.
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/block/300", timeout=30) as answer:
                assert answer.status == 200
            ended[:] = re.findall(r"burst (\w+) of process \d+: \d+ calls", daemon.log)
            return len(ended) == 2

        until(served, "both bursts have ended", 60, every_s=0.0)
        assert ended == ["malloc", "syscalls"]
        report = json.loads(daemon.output("burst", "last", "--json"))
        assert report["kind"] == "syscalls"
        assert sum(r["calls"] for r in report["syscalls"]) > 0
        assert len(re.findall(r"burst of process", daemon.log)) == 1  # however many requests were slow
        assert daemon.stop() == 0
    finally:
        daemon.kill()
