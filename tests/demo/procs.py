"""Child processes of the demo: named, pinned to a CPU, and never outliving their parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


class DemoError(Exception):
    """The demo cannot go on; one clear line for the user."""


def set_name(name: str) -> None:
    """Set the calling thread's comm; the kernel keeps 15 bytes."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def spawn(
    argv: Sequence[str],
    cpu: int | set[int],
    *,
    before_exec: Callable[[], None] | None = None,
    deadly: signal.Signals = signal.SIGKILL,
    **kwargs: Any,
) -> subprocess.Popen[bytes]:
    """Start a child pinned to ``cpu`` (one or several) that gets ``deadly`` when the demo dies, even by SIGKILL.

    Own session: Ctrl-C reaches only the demo, which then stops its children in order.
    """

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(deadly), 0, 0, 0)
        os.sched_setaffinity(0, {cpu} if isinstance(cpu, int) else cpu)
        if before_exec:
            before_exec()

    return subprocess.Popen(list(argv), cwd=ROOT, preexec_fn=prepare, start_new_session=True, **kwargs)  # noqa: PLW1509


def pin(tgid: int, cpus: set[int]) -> None:
    """Move every thread that a process has now."""
    for task in Path(f"/proc/{tgid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cpus)


def favour(process: subprocess.Popen[bytes]) -> None:
    """Let a session leader's autogroup have the CPU when it wants it.

    Beside threads that spin with sched_yield the scheduler starves another group of the same weight. A unit of systemd
    has CPUWeight for that; a test has this.
    """
    try:
        Path(f"/proc/{process.pid}/autogroup").write_text("-10")
    except OSError:
        pass  # no autogroups: all are in one group, or in cgroups


def python(module: str, *args: object) -> list[str]:
    """The command line that runs one of the demo's modules in this interpreter."""
    return [sys.executable, "-m", module, *map(str, args)]


def stop(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """Ask a child to end, then make it; harmless on a dead one."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_http(url: str, process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Wait until ``url`` answers.

    Raises:
        DemoError: the process ended, or the time is over.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise DemoError(f"the server ended with {process.returncode} before it answered")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise DemoError(f"{url} did not answer in {timeout_s:.0f} s")


def run_delay_ns(tgid: int) -> int:
    """Run-queue delay of all threads of a process since their start, in ns (schedstat's second field)."""
    total = 0
    for path in Path(f"/proc/{tgid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total


def cpu_ns(tgid: int) -> int:
    """CPU time of all live threads of a process, in ns (schedstat's first field)."""
    total = 0
    for path in Path(f"/proc/{tgid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except (OSError, IndexError):
            continue
    return total


async def until(done: Callable[[], bool], cap_s: float, what: str, every_s: float = 0.1) -> None:
    """Wait until *done*; raise DemoError, with *what* was waited for, after *cap_s* seconds."""
    end = time.monotonic() + cap_s
    while not done():
        if time.monotonic() > end:
            raise DemoError(f"not in {cap_s:.0f} s: {what}")
        await asyncio.sleep(every_s)
