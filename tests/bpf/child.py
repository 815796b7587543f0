"""A child process whose work begins when it is told, so that it can be watched before."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bpf.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """Runs ``tests.bpf.workloads NAME ARGUMENTS``. ``facts`` is what it said when it was ready."""

    def __init__(
        self, name: str, *arguments: object, cpu: int | None = None, before: Callable[[], None] | None = None
    ) -> None:
        """Start it, pinned to *cpu* if given; *before* runs in it before the program begins."""

        def prepare() -> None:
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
            if before is not None:
                before()

        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bpf.workloads", name, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=prepare,  # noqa: PLW1509
            start_new_session=True,
        )
        self._pending = b""
        self.tgid = self._process.pid
        self.facts = self.answer()

    def say(self, message: Any = "go") -> None:
        """Send one line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = DEADLINE_S) -> Any:
        """Return its next line, decoded.

        Raises:
            AssertionError: it ended, or said nothing in time.
        """
        assert self._process.stdout is not None
        fd, end_s = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([fd], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"the child said nothing in {timeout_s:.0f} s"
            data = os.read(fd, 65536)
            assert data, f"the child ended with {self._process.wait()}"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def run(self, message: Any = "go", timeout_s: float = DEADLINE_S) -> Any:
        """Let it work and return its result."""
        self.say(message)
        return self.answer(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Close its input, upon which it exits, and return its status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Kill it and what it started, if it is still there."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
