"""The runner of guests: the status and the output come back, a dead guest is told from a failed command, none stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.bpf.waiting import until
from tests.vm import guest
from tests.vm.kernels import kernel
from tests.vm.rootdisk import REPOSITORY
from tests.vm.test_kernels import CHOSEN, SMOKE

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(SMOKE, reason="SMOKE: only the tier bpf"),
]
SERIES = CHOSEN[-1]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_status_the_output_and_what_is_written_come_back(tmp_path: Path) -> None:
    shown: list[str] = []
    command = ["sh", "-c", 'uname -r; stat -f -c %T /sys/fs/cgroup; echo kept > "$OUT/file"; exit 37']
    ended = guest.run(kernel(SERIES), command, tmp_path / "out", show=shown.append)
    assert ended.status == 37
    assert "".join(shown).splitlines() == [kernel(SERIES).release, "cgroup2fs"]
    assert (tmp_path / "out/file").read_text() == "kept\n"


def test_a_guest_that_dies_is_no_failed_command(tmp_path: Path) -> None:
    with pytest.raises(guest.GuestError, match=r"the guest died: .*panic"):
        guest.run(kernel(SERIES), ["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 600"], tmp_path / "out")


def test_a_killed_runner_leaves_no_guest_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    runner = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.vm.guest",
            "--kernel",
            SERIES,
            "--out",
            str(out),
            "--",
            "sleep",
            "3600",
        ],
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        until((out / "began").exists, "the guest runs its command", timeout_s=1200, every_s=0.5)
        started = psutil.Process(runner.pid).children(recursive=True)
        assert any(p.name().startswith("qemu") for p in started)
    finally:
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait()
    until(lambda: not any(map(alive, started)), "all that it started has ended")
