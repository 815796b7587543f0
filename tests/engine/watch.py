"""The agent beside a server under test: started with a configuration, ready when its probes are attached."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from whyspan.model import Finding
from whyspan_exporters.reader import Reader

from tests.demo.procs import favour, spawn, stop

CONFIG = """\
[targets]
auto = false
match = [{{ pid = {pid}, service = "vllm" }}]

[run]
state_dir = "{state}"

{more}
"""


class Watch:
    """One ``whyspan run``. A context manager."""

    def __init__(self, folder: Path, pid: int, more: str = "", cpus: set[int] | None = None) -> None:
        """*more* is added to the configuration: whole sections in TOML."""
        self.state = folder / "state"
        self.state.mkdir(parents=True)
        self.config = folder / "whyspan.toml"
        self.config.write_text(CONFIG.format(pid=pid, state=self.state, more=more))
        self.log = folder / "agent.log"
        self._cpus = cpus or {0, 1}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watch:
        """Start it and wait until every probe that can be attached is."""
        program = str(Path(sys.executable).with_name("whyspan"))
        with self.log.open("wb") as log:
            self.process = spawn(
                [program, "run", "--config", str(self.config)],
                self._cpus,
                deadly=signal.SIGTERM,
                stdout=log,
                stderr=log,
            )
        favour(self.process)
        self.wait(lambda: "ready after" in self.log.read_text(), 30, "ready")
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, everything delivered."""
        if self.process is not None:
            stop(self.process, 20)

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until *done*; fail with the end of the agent's log when it never is."""
        end = time.monotonic() + timeout_s
        while not done():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"not {what} in {timeout_s} s: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def findings(self) -> dict[str, Finding]:
        """Return what the store holds, by trace id."""
        reader = Reader(self.state / "whyspan.db")
        try:
            stored = reader.newest(limit=100_000, ordinary=True)
        finally:
            reader.close()
        return {s.finding.request.trace_id: s.finding for s in stored}

    def query(self, command: str) -> Any:
        """Return what a command prints with ``--json``; None when it cannot answer yet."""
        program = str(Path(sys.executable).with_name("whyspan"))
        argv = [program, command, "--config", str(self.config), "--json"]
        done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
        return json.loads(done.stdout) if done.returncode == 0 and done.stdout.strip() else None

    def explained(self, trace_ids: Iterable[str], timeout_s: float = 30) -> dict[str, Finding]:
        """Wait until the store holds these requests, ended, and return what it holds."""
        wanted = set(trace_ids)

        def done() -> bool:
            found = self.findings()
            return wanted <= {t for t, f in found.items() if f.request.outcome != "open"}

        self.wait(done, timeout_s, "explained")
        return self.findings()
