"""Collections and compilers inside real requests, from the kernel to the verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from whyspan.causes.engine_jit_compile import COMPILERS

from tests.bpf.daemon import Daemon
from tests.demo.procs import ROOT, favour

pytestmark = pytest.mark.bpf

REQUESTS = 11


@pytest.mark.parametrize(
    ("route", "cause"), [("/v1/collect", "python.gc"), ("/v1/compile", "engine.jit_compile")]
)
def test_the_cause_and_whose_it_is(route: str, cause: str, tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bpf.python_server"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    favour(server)
    daemon: Daemon | None = None
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        daemon = Daemon(tmp_path, server.pid)
        daemon.wait_ready()
        verdicts = daemon.verdicts(port, route, REQUESTS)
        named = [v["culprit"] for v in verdicts if v["cause"] == cause]
        # Whatever else this host runs may have had the CPU for longer than that took: then it comes second.
        behind = [v for v in verdicts if v["cause"] == "cpu.runqueue"]
        assert all(cause in [other["cause"] for other in v["others"]] for v in behind), behind
        told = [(v["cause"], v["culprit"]["name"]) for v in verdicts]
        assert named and len(named) + len(behind) >= 0.9 * REQUESTS, told
        if cause == "python.gc":
            assert {(c["kind"], c["tid"]) for c in named} == {("thread", server.pid)}
            assert all(c["detail"].startswith("all generations") for c in named)
        else:
            assert {c["name"] for c in named} <= COMPILERS
            assert {c["kind"] for c in named} == {"process"}
    finally:
        if daemon:
            daemon.kill()
        server.kill()
        server.wait()
