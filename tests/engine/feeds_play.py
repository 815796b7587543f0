"""Talks to ``feeds_peer.py``: an engine's own classes and publishers, in vLLM's environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.engine import feeds_sglang, install

PEER = Path(__file__).with_name("feeds_peer.py")
#: Token ids in every batch that it makes (as in feeds_peer.py).
CANARY = [777_000_000 + 7 * n for n in range(64)]


class Peer:
    """One peer process. A context manager; ``ask`` waits for the answer."""

    def __init__(self, engine: str) -> None:
        folder = str(feeds_sglang.ensure()) if engine == "sglang" else ""
        self._process = subprocess.Popen(
            [str(install.python()), "-P", str(PEER), engine, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        )

    def __enter__(self) -> Peer:
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, do: str, **more: Any) -> Any:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the package may log there too
            if line.startswith('"'):
                return json.loads(line)
        raise AssertionError("the peer has ended")
