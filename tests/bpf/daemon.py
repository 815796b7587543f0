"""``whyspan run`` under test, and the commands that read its store."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bpf.waiting import until

WHYSPAN = str(Path(sys.executable).with_name("whyspan"))

CONFIG = """\
[targets]
auto = false
match = [{targets}]

[slo]
{slo}

[collector]
explain_per_s = 1000
explain_core_ratio = 2
ordinary_per_s = 1000
{collector}

[run]
state_dir = "{folder}/state"
"""


class Daemon:
    """Explains every request of the processes given. ``log`` is what it wrote to standard error so far.

    Unless *slo* says otherwise every request is slow.
    """

    def __init__(
        self, folder: Path, *tgids: int, collector: str = "", slo: str = "e2e_ms = 0.000001"
    ) -> None:
        self._config = folder / "whyspan.toml"
        targets = ", ".join(f"{{ pid = {t} }}" for t in tgids)
        text = CONFIG.format(folder=folder, targets=targets, collector=collector, slo=slo)
        self._config.write_text(text)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [WHYSPAN, "run", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stderr=log,
                stdout=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def child(self, name: str) -> int:
        """Return the process id of collector or exporter, 0 before it was started."""
        found = re.findall(rf"{name} started, process (\d+)", self.log)
        return int(found[-1]) if found else 0

    def wait_ready(self) -> None:
        """Wait until the collector has attached its probes."""

        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return "ready after" in self.log

        until(ready, "the collector is ready")

    def stop(self, timeout_s: float = 10.0) -> int:
        """Send SIGTERM and return the exit status.

        Raises:
            TimeoutExpired: it did not end in time.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End it, whatever state it is in; its children end with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def output(self, *arguments: str) -> str:
        """Run a command and return all that it printed."""
        done = subprocess.run(
            [WHYSPAN, *arguments, *([] if arguments[0] == "replay" else ["--config", str(self._config)])],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def findings(self) -> list[dict[str, Any]]:
        """Return what ``slow --json`` lists."""
        out = self.output("slow", "--all", "--limit", "10000", "--json")
        try:
            found: list[dict[str, Any]] = json.loads(out)
        except ValueError:
            return []
        return found

    def verdicts(self, port: int, route: str, count: int) -> list[dict[str, Any]]:
        """Send requests one after the other and return the verdicts once all of them are stored."""
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(count):
            client.request("GET", route)
            assert client.getresponse().read() == b"ok"
        client.close()
        until(lambda: len(self.findings()) == count, "all requests are stored", every_s=0.3)
        return [f["verdict"] for f in self.findings()]
