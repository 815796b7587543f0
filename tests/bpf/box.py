"""A container of our own making: a server in PID, mount, network and cgroup namespaces, and in its control group."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from whyspan import cgroups

from tests.bpf.waiting import until

SERVER = Path(__file__).with_name("box_server.py")
CLONE_NEWNET = 0x40000000
#: Arguments: a root or nothing, a folder for what is written. Mounts the root as container runtimes do: an overlay,
#: made the root by pivot_root, so that paths in it mean nothing outside.
ENTER = """\
set -e
root="$1" work="$2"; shift 2
if [ -n "$root" ]; then
  mkdir -p "$work/upper" "$work/work" "$work/merged"
  mount -t overlay overlay -o "lowerdir=$root,upperdir=$work/upper,workdir=$work/work" "$work/merged"
  cd "$work/merged"
  pivot_root . mnt
fi
mount -t proc proc /proc
[ -z "$root" ] || umount -l /mnt
exec "$@"
"""


class Group:
    """A control group in every hierarchy that has the CPU controller, and in version 2: as a runtime makes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        mounts = cgroups.cpu_mounts(cgroups.mounts())
        self._folders = [m.point / path.lstrip("/") for m in mounts if m.root == "/"]
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)

    def join(self) -> None:
        """Put the calling process into it, for use between fork and exec."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove it, and its parents as far as they are empty; its processes must be ending."""
        for folder in self._folders:
            end_s = time.monotonic() + 10
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > end_s:
                        break
                    time.sleep(0.02)
            for parent in list(folder.parents)[: self.path.count("/") - 1]:
                with contextlib.suppress(OSError):
                    parent.rmdir()


class Box:
    """Runs the server. ``tgid`` is its number on the host; ``said`` what it said of itself."""

    def __init__(
        self,
        folder: Path,
        group: Group,
        *,
        root: Path | None = None,
        python: str = sys.executable,
        cpu: int | None = None,
    ) -> None:
        """Start it: *root* is its root folder and *python* an interpreter in it; default: the host's."""
        #: Its log, as a path in the box.
        self.log = "/var/log/box.log" if root else str(folder / "box.log")

        def prepare() -> None:
            group.join()
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})

        self._process = subprocess.Popen(
            [
                *("unshare", "--pid", "--mount", "--net", "--cgroup", "--uts", "--fork", "--kill-child"),
                *("sh", "-c", ENTER, "sh", str(root or ""), str(folder)),
                *(python, "-c", SERVER.read_text(), self.log),
            ],
            stdout=subprocess.PIPE,
            preexec_fn=prepare,  # noqa: PLW1509
        )
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            assert line, "the box did not start"
            self.said: dict[str, Any] = json.loads(line)
            (inner,) = psutil.Process(self._process.pid).children()
            self.tgid = inner.pid
        except BaseException:
            self.kill()
            raise

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to the server, made in its network namespace; the client is not in the box."""
        made: list[socket.socket] = []

        def enter() -> None:  # a namespace is a thread's
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{self.tgid}/ns/net") as f:
                if libc.setns(f.fileno(), CLONE_NEWNET):
                    return
            made.append(socket.create_connection(("127.0.0.1", self.said["port"]), timeout=60))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert made, "cannot connect inside the box"
        client = http.client.HTTPConnection("127.0.0.1", self.said["port"])
        client.sock = made[0]
        return client

    def get(self, path: str, headers: dict[str, str], client: http.client.HTTPConnection) -> None:
        """Make a request and take its answer."""
        client.request("GET", path, headers=headers)
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (200, b"ok")

    def kill(self) -> None:
        """End it as a runtime does: its first process, and with that all of them."""
        with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
            psutil.Process(self.tgid).send_signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with contextlib.suppress(AttributeError):
            until(lambda: not psutil.pid_exists(self.tgid), "the box is gone")
