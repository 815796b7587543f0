"""What a run in the guest did, step by step, with its times: ``build/vm/install.json``, from which the docs quote."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.demo.procs import ROOT

FILE = ROOT / "build" / "vm" / "install.json"


class Journal:
    """The steps of one run in one kernel; written after each, so that a run that breaks off shows how far it came."""

    def __init__(self, kernel: str, path: Path = FILE) -> None:
        """Begin a run; what an earlier one of this kernel wrote is replaced."""
        self._kernel, self._path = kernel, path
        self._began_s = time.monotonic()
        self.facts: dict[str, Any] = {"passed": False, "steps": []}
        self._write()

    @contextlib.contextmanager
    def step(self, name: str, command: str = "") -> Iterator[dict[str, Any]]:
        """Time one step; the body may add to what is yielded. A step that raises is written as failed."""
        entry: dict[str, Any] = {"step": name, **({"command": command} if command else {}), "passed": False}
        self.facts["steps"].append(entry)
        began_s = time.monotonic()
        print(f"{began_s - self._began_s:7.1f} s  {self._kernel}: {name}", flush=True)
        try:
            yield entry
            entry["passed"] = True
        except BaseException as e:
            entry["error"] = str(e)[:2000]
            raise
        finally:
            entry["seconds"] = round(time.monotonic() - began_s, 1)
            self._write()

    def note(self, **facts: Any) -> None:
        """Add facts about the run as a whole."""
        self.facts |= facts
        self._write()

    def passed(self) -> None:
        """All steps are done."""
        self.facts["passed"] = True
        self._write()

    def _write(self) -> None:
        self.facts["seconds"] = round(time.monotonic() - self._began_s, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(self._path.read_text())
        except (OSError, ValueError):
            known = {}
        known[self._kernel] = self.facts
        made = self._path.with_suffix(".tmp")
        made.write_text(json.dumps(known, indent=1) + "\n")
        made.replace(self._path)
