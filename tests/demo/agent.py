"""The agent as its user sees it: a configuration file, ``whyspan run``, and the JSON of its commands."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from tests.demo.engines import Engine
from tests.demo.procs import ROOT, DemoError, favour, spawn, stop

CONFIG = """\
# Written by the demo: every slow request of one server is explained.
[targets]
auto = false
match = [{{ pid = {pid}, service = "{service}" }}]

[slo]
e2e_ms = {e2e_ms}

[collector]
explain_per_s = 100
explain_core_ratio = 2
ordinary_per_s = {ordinary_per_s:g}

[run]
state_dir = "{directory}/state"
"""


class Agent:
    """One ``whyspan run`` and the commands that read its store."""

    def __init__(self, directory: Path, engine: Engine, e2e_ms: int) -> None:
        self.config = directory / "whyspan.toml"
        text = CONFIG.format(
            directory=directory,
            pid=engine.pid,
            service=engine.service,
            ordinary_per_s=engine.ordinary_per_s,
            e2e_ms=e2e_ms,
        )
        self.config.write_text(text, encoding="utf-8")
        shutil.rmtree(directory / "state", ignore_errors=True)
        (directory / "state").mkdir()
        self._log_path = directory / "agent.log"
        self._log: IO[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def _argv(self, *args: str) -> list[str]:
        return [str(Path(sys.executable).with_name("whyspan")), *args, "--config", str(self.config)]

    def start(self, cpu: int) -> None:
        """Start it, pinned to ``cpu``; its output goes to agent.log."""
        self._log = self._log_path.open("wb")
        self.process = spawn(
            self._argv("run"),
            cpu,
            deadly=signal.SIGTERM,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        favour(self.process)

    def stop(self) -> None:
        if self.process:
            stop(self.process, 10)
        if self._log:
            self._log.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until a request is in the store, so that what follows is watched.

        Raises:
            DemoError: the agent ended, or stored nothing in time.
        """
        end = time.monotonic() + timeout_s
        while not self.requests():
            self.check_alive()
            if time.monotonic() > end:
                raise DemoError(f"the agent stored no request in {timeout_s:.0f} s; see {self._log_path}")
            time.sleep(0.3)

    def check_alive(self) -> None:
        """Check that it runs.

        Raises:
            DemoError: the agent ended; the message carries the end of its log.
        """
        if self.process and self.process.poll() is not None:
            tail = self._log_path.read_text(errors="replace")[-2000:]
            raise DemoError(f"the agent ended with {self.process.returncode}:\n{tail}")

    def query(self, *args: str) -> Any:
        """Run a command with ``--json`` and decode it; None when it fails."""
        done = subprocess.run(
            self._argv(*args, "--json"), cwd=ROOT, capture_output=True, timeout=60, check=False
        )
        return json.loads(done.stdout) if done.returncode == 0 and done.stdout.strip() else None

    def requests(self) -> dict[str, dict[str, Any]]:
        """Every request in the store, by trace id."""
        rows = self.query("slow", "--all", "--limit", "10000") or []
        return {row["trace_id"]: row for row in rows}

    def wait_for(self, trace_ids: Collection[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """The store once it holds all of ``trace_ids``, or what it holds after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while True:
            rows = self.requests()
            if time.monotonic() > end or all(t in rows for t in trace_ids):
                return rows
            self.check_alive()
            time.sleep(0.5)

    def explain(self, trace_id: str) -> str:
        """What ``whyspan explain`` prints for a person."""
        done = subprocess.run(
            self._argv("explain", trace_id), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout or done.stderr

    def save_html(self, trace_id: str, path: Path) -> str:
        """Write the page of a request. Returns why not, empty when it is written."""
        done = subprocess.run(
            self._argv("explain", trace_id, "--html", str(path)),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return "" if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}")
