"""``whyspan doctor`` in the places and with the rights that it is to tell apart, and beside a running agent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bpf.daemon import WHYSPAN, Daemon
from tests.bpf.waiting import until

pytestmark = pytest.mark.bpf

NOBODY = 65534
#: linux/capability.h; Debian 12's setpriv does not know all names.
BPF, PERFMON, PTRACE, READ, ADMIN, RESTORE = 39, 38, 19, 2, 21, 40


def doctor(*wrapped: str, folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run it behind other commands; returns its exit status and its checks by id."""
    done = subprocess.run(
        [*wrapped, WHYSPAN, "doctor", "--no-attach", "--json"],
        capture_output=True,
        text=True,
        env=os.environ
        | {"WHYSPAN_OVERRIDES": json.dumps({"run": {"state_dir": str(folder)}}), "WHYSPAN_CONFIG": ""},
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["exit_status"] == done.returncode
    return done.returncode, {c["id"]: c for c in report["checks"]}


def states(checks: dict[str, dict[str, Any]], state: str) -> set[str]:
    return {
        i.removeprefix("privilege.") for i, c in checks.items() if c["state"] == state and "privilege" in i
    }


def test_as_root_nothing_is_in_the_way(tmp_path: Path) -> None:
    status, checks = doctor(folder=tmp_path)
    assert status in (0, 3)
    assert states(checks, "failed") == states(checks, "limited") == set()


@pytest.mark.parametrize(
    ("options", "failed"),
    [
        (["--user", "--map-root-user"], "user_namespace"),
        (["--pid", "--fork", "--mount-proc"], "pid_namespace"),
        (["--time", "--monotonic", "1000", "--fork"], "time_namespace"),
    ],
)
def test_namespaces(tmp_path: Path, options: list[str], failed: str) -> None:
    status, checks = doctor("unshare", *options, folder=tmp_path)
    assert status == 4
    assert states(checks, "failed") == {failed}


def test_a_cgroup_namespace_is_left(tmp_path: Path) -> None:
    _, checks = doctor("unshare", "--cgroup", folder=tmp_path)
    assert checks["privilege.cgroup_namespace"]["state"] == "ok"


@pytest.mark.parametrize(
    ("given", "failed", "limited"),
    [
        (
            (),
            {"load"},
            {"sys_ptrace", "dac_read_search", "checkpoint_restore", "sys_admin"},
        ),
        ((BPF, PERFMON), set(), {"sys_ptrace", "dac_read_search", "checkpoint_restore", "sys_admin"}),
        ((BPF, PERFMON, PTRACE, READ, RESTORE), set(), {"sys_admin"}),
        ((BPF, PERFMON, PTRACE, READ, ADMIN), set(), set()),
    ],
)
def test_capabilities(tmp_path: Path, given: tuple[int, ...], failed: set[str], limited: set[str]) -> None:
    sets = ",".join(["-all", *(f"+cap_{n}" for n in given)])
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    rights = [f"--{kind}={sets}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    _, checks = doctor("setpriv", *user, *rights, folder=tmp_path)
    assert states(checks, "failed") == failed
    assert states(checks, "limited") == limited


def test_beside_a_running_agent(tmp_path: Path) -> None:
    sleep = subprocess.Popen([shutil.which("sleep") or "sleep", "1000"])
    daemon = Daemon(tmp_path, sleep.pid)
    try:
        daemon.wait_ready()
        config = str(tmp_path / "whyspan.toml")

        def look() -> dict[str, dict[str, Any]]:
            out = subprocess.run(
                [WHYSPAN, "doctor", "--json", "--config", config], capture_output=True, text=True, check=False
            ).stdout
            return {c["id"]: c for c in json.loads(out)["checks"]}

        until(lambda: look()["service.agent"]["state"] == "ok", "the agent has reported", every_s=0.5)
        checks = look()
        collector = daemon.child("collector")
        assert checks["service.agent"]["found"] == f"process {collector}, 1 processes watched"
        assert checks["privilege.collector"]["state"] == "ok"
        assert f"process {collector}: " in checks["privilege.collector"]["found"]
        # The probes attach once more, beside those of the agent.
        assert {checks[f"probe.{name}"]["state"] for name in ("sched", "sockets")} == {"ok"}
    finally:
        daemon.kill()
        sleep.kill()
        sleep.wait()
