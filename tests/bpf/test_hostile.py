"""The agent beside hostile and odd processes: it goes on, explains its server's requests, and shows nothing raw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.bpf.daemon import Daemon
from tests.bpf.hostile import KINDS
from tests.bpf.waiting import until
from tests.demo.procs import ROOT

pytestmark = pytest.mark.bpf

REQUESTS = 7


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """One process of each kind, all of them ready."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for kind in KINDS:
            folder = tmp_path / f"odd-{kind}"
            folder.mkdir()
            started[kind] = subprocess.Popen(
                [sys.executable, "-m", "tests.bpf.hostile", kind, str(folder)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
        for kind, process in started.items():
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", kind
        yield started
    finally:
        for process in started.values():
            for child in psutil.Process(process.pid).children() if process.poll() is None else ():
                child.kill()
            process.kill()
            process.wait()


def test_all_of_them_are_watched_and_nothing_breaks(
    tmp_path: Path, odd: dict[str, subprocess.Popen[bytes]]
) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bpf.oversubscribed_server"], cwd=ROOT, stdout=subprocess.PIPE
    )
    daemon: Daemon | None = None
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        daemon = Daemon(tmp_path, server.pid, *(p.pid for p in odd.values()))
        daemon.wait_ready()
        collector = daemon.child("collector")
        verdicts = daemon.verdicts(port, "/v1/hash", REQUESTS)
        assert len(verdicts) == REQUESTS
        until(
            lambda: daemon is not None and f"watching process {odd['names'].pid}" in daemon.log,
            "it is watched",
        )
        odd["brief"].kill()  # a target that ends, and stays a zombie until the test waits for it
        shown = [
            daemon.log,
            daemon.output("slow", "--all"),
            daemon.output("explain", daemon.findings()[0]["trace_id"]),
            daemon.output("probes"),
            daemon.output("engines"),
        ]
        for text in shown:
            assert not [c for c in text if not c.isprintable() and c not in "\n\t"], text[:400]
            assert "Traceback" not in text
        assert "restarting" not in daemon.log
        assert daemon.child("collector") == collector
        # The CPUs are theirs until here; how long a stop takes beside that is the scheduler's doing.
        server.kill()
        for process in odd.values():
            process.kill()
        assert daemon.stop() == 0
    finally:
        if daemon:
            daemon.kill()
        server.kill()
        server.wait()
