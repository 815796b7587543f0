"""The cause ``cpu.oversubscribed`` on a real process, and not its neighbours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bpf.daemon import Daemon
from tests.demo.procs import ROOT

pytestmark = pytest.mark.bpf

REQUESTS = 13


def test_the_service_itself_is_named(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bpf.oversubscribed_server"], cwd=ROOT, stdout=subprocess.PIPE
    )
    daemon: Daemon | None = None
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        daemon = Daemon(tmp_path, server.pid)
        daemon.wait_ready()
        verdicts = daemon.verdicts(port, "/v1/hash", REQUESTS)
        named = [v for v in verdicts if v["cause"] == "cpu.oversubscribed"]
        assert len(named) >= 0.9 * REQUESTS, [v["cause"] for v in verdicts]
        assert {v["culprit"]["tgid"] for v in named} == {server.pid}
        shown = json.loads(daemon.output("explain", daemon.findings()[0]["trace_id"], "--json"))
        ruled_out = {r["cause"]: r["check"] for r in shown["ruled_out"]}
        assert "0.0 ms" in ruled_out["cpu.throttled"]
    finally:
        if daemon:
            daemon.kill()
        server.kill()
        server.wait()
