"""A marker that is caught, and a torch of the few things that the hooks use."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whyspan import marks

from tests.unit.inproc_hooks.fake import FakeCuda

PACKAGE = str(Path(__file__).parents[3] / "probes" / "whyspan_inproc")
if PACKAGE not in sys.path:
    sys.path.insert(0, PACKAGE)


class Sent(list[tuple[int, bytes]]):
    """Marks as they would reach the probe."""

    watching = 1

    def bodies(self) -> list[marks.Body]:
        """Decode as the agent does, and forget."""
        found = [marks.decode(k, p, ts_ns=1 << 61, tid=1, tgid=1).body for k, p in self]
        self.clear()
        return found

    def raw(self) -> list[dict[str, Any]]:
        """Return the bodies as sent."""
        return [json.loads(p) for _, p in self]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What is sent; ``watching = 0`` ends watching."""
    emit: Any = importlib.import_module("whyspan_inproc.emit")
    caught = Sent()
    monkeypatch.setattr(emit, "_mark", lambda kind, payload: caught.append((kind, payload)))
    monkeypatch.setattr(emit, "_watchers", lambda: caught.watching)
    return caught


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A torch with a CUDA device, not initialised."""
    torch, fake = types.ModuleType("torch"), FakeCuda()
    torch.compiler = types.SimpleNamespace(is_compiling=lambda: fake.compiling)  # type: ignore[attr-defined]
    torch.cuda = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    yield fake
