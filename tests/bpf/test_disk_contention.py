"""The cause ``io.disk_contention`` on a real disk: a loop device of our own with a neighbour that fills its queue."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until
from tests.demo.procs import ROOT

pytestmark = pytest.mark.bpf

REQUESTS = 11
NEIGHBOURS = 4
MODULE = [sys.executable, "-m", "tests.bpf.fsync_server"]


def run(*argv: object) -> None:
    subprocess.run([str(a) for a in argv], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount an ext4 file system on a loop device, and take it away again."""
    for tool in ("mkfs.ext4", "losetup"):
        if shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
            pytest.skip(f"needs {tool}")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with contextlib.ExitStack() as undo:
        run("truncate", "-s", "400M", image)
        run("/usr/sbin/mkfs.ext4", "-q", "-F", image)
        losetup = ["/usr/sbin/losetup", "--direct-io=on", "-f", "--show", str(image)]
        device = subprocess.run(losetup, capture_output=True, text=True, check=True).stdout.strip()
        undo.callback(run, "/usr/sbin/losetup", "-d", device)
        run("mount", device, folder)
        undo.callback(run, "umount", folder)
        yield folder


def test_whoever_fills_the_disk_is_named(disk: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as undo:

        def start(*arguments: object) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([*MODULE, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE)
            undo.callback(process.wait)
            undo.callback(process.kill)
            return process

        server = start("serve", disk)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        daemon = Daemon(tmp_path, server.pid)
        undo.callback(daemon.kill)
        daemon.wait_ready()
        neighbours = {start("fill", disk / f"n{i}").pid for i in range(NEIGHBOURS)}
        until(lambda: len(list(disk.glob("n*"))) == NEIGHBOURS, "the neighbours write")
        verdicts = daemon.verdicts(port, "/v1/save", REQUESTS)
        named = [v for v in verdicts if v["cause"] == "io.disk_contention"]
        assert len(named) >= 0.7 * REQUESTS, [v["cause"] for v in verdicts]
        culprits = {v["culprit"]["tgid"] for v in named if v["culprit"]["kind"] == "process"}
        # Some of the requests are given to the device by a kernel worker.
        assert culprits & neighbours, [v["culprit"] for v in named]
