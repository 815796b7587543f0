"""The stub engine and its neighbour as child processes of a test."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.demo.procs import ROOT, python
from tests.stubs.device import Device
from tests.stubs.model import RULES


@dataclass(frozen=True)
class Served:
    """A stub engine that answers."""

    process: subprocess.Popen[bytes]
    port: int

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the whole answer.

        Raises:
            urllib.error.HTTPError: the status says that it failed.
        """
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=120) as answer:
            found: bytes = answer.read()
        return found

    def complete(self, max_tokens: int = 16, prompt: int = 32) -> float:
        """Stream a request; return the seconds that it took."""
        begin = time.monotonic()
        self.post("/v1/completions", {"prompt": [1] * prompt, "max_tokens": max_tokens})
        return time.monotonic() - begin

    def fault(self, **values: Any) -> None:
        """Change what is wrong (``model.Faults``); without values nothing is."""
        self.post("/fault", values)

    def steps(self) -> list[dict[str, int]]:
        """Return the engine's own record of its last steps."""
        found: list[dict[str, int]] = json.loads(self.post("/steps", {}))
        return found


@contextmanager
def engine(device: Device, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Run the stub engine on a device; its kernels take what ``model.RULES`` says. ``env`` adds to its environment.

    Raises:
        RuntimeError: it does not come up.
    """
    device.rules(RULES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    argv = python("tests.stubs.engine", "--port", port, *options)
    marks = {"PYTHONPATH": str(ROOT / "probes" / "whyspan_inproc")}
    process = subprocess.Popen(argv, cwd=ROOT, env=device.env | marks | dict(env or {}))
    served = Served(process, port)
    try:
        _until_ready(served)
        yield served
    finally:
        process.kill()
        process.wait()


def _until_ready(served: Served) -> None:
    deadline = time.monotonic() + 60
    while served.process.poll() is None and time.monotonic() < deadline:
        try:
            served.post("/health", {})
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError("the stub engine does not come up")


@contextmanager
def hog(device: Device, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run another job on the device."""
    argv = python("tests.stubs.hog", *options)
    process = subprocess.Popen(argv, cwd=ROOT, env=device.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        if not process.stdout or process.stdout.readline() != b"ready\n":
            raise RuntimeError("the hog does not start")
        yield process
    finally:
        process.kill()
        process.communicate()
