"""The switch for faults inside a server: ``POST /fault`` with ``{"fault": id, "settings": {...} | null}``.

Runs in the server's process and environment: the standard library only.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.host.fault import Inside

PATH = "/fault"


class Control:
    """The faults that are on in this process."""

    def __init__(self) -> None:
        self._known: dict[str, Inside] = {}
        self._on: dict[str, Inside] = {}

    def switch(self, body: bytes) -> int:
        """Do what a posted body says and return the HTTP status."""
        asked = json.loads(body)
        fault, settings = str(asked["fault"]), asked["settings"]
        running = self._on.pop(fault, None)
        if running is not None:
            running.stop()
        if settings is not None:
            inside = self._inside(fault)
            inside.start(settings)
            self._on[fault] = inside
        return 200

    def _inside(self, fault: str) -> Inside:
        if fault not in self._known:
            found: Any = importlib.import_module(f"tests.faults.host.{fault}").INSIDE
            self._known[fault] = found() if isinstance(found, type) else found
        return self._known[fault]

    async def on_loop(self) -> None:
        """Let the faults act before a request is worked on."""
        for inside in tuple(self._on.values()):
            await inside.on_loop()

    def on_worker(self) -> None:
        """Let the faults act on the thread that works for a request."""
        for inside in tuple(self._on.values()):
            inside.on_worker()

    def route(self, path: str) -> Callable[[], bytes] | None:
        """Return what answers a GET of a path, if a fault that is on does."""
        for inside in tuple(self._on.values()):
            if (answer := inside.routes().get(path)) is not None:
                return answer
        return None
