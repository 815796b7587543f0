"""The package from the tree with its marker built, and marks that are caught instead of sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whyspan import marks

from tests.build_inproc import build

PACKAGE = Path(__file__).parents[3] / "probes" / "whyspan_inproc"
if str(PACKAGE) not in sys.path:
    sys.path.insert(0, str(PACKAGE))
build()

from whyspan_inproc import emit  # noqa: E402


class Caught:
    """Marks as they would reach the probe. ``watchers`` is what the kernel's counter would say."""

    def __init__(self) -> None:
        self.watchers = 1
        self.sent: list[tuple[int, bytes]] = []

    def bodies(self) -> list[marks.Body]:
        """Return what was sent, decoded as the agent does, and forget it.

        Raises:
            BadMarkError: the agent would drop it.
        """
        found = [marks.decode(k, p, ts_ns=1 << 61, tid=1, tgid=1).body for k, p in self.sent]
        self.sent.clear()
        return found

    def raw(self) -> list[dict[str, Any]]:
        """Return the JSON objects that were sent."""
        return [json.loads(payload) for _, payload in self.sent]


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Caught:
    """Somebody watches; nobody has been introduced to anything yet."""
    state = Caught()
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(emit, "_mark", lambda kind, payload: state.sent.append((kind, payload)))
    monkeypatch.setattr(emit, "_watchers", lambda: state.watchers)
    monkeypatch.setattr(emit, "_callables", calls)
    monkeypatch.setattr(emit, "_known", 0)
    monkeypatch.setattr(emit, "dropped", {"long": 0, "failed": 0})
    return state
