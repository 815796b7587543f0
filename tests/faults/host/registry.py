"""Finds the faults: every module of this package that assigns ``FAULT``. One that cannot be imported stops nobody."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.faults.host.fault import Fault

FOLDER = Path(__file__).parent
_ASSIGNED = re.compile(r"^FAULT\b", re.MULTILINE)


def names() -> list[str]:
    """Return the ids of all faults, by their files."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if _ASSIGNED.search(p.read_text(encoding="utf-8")))


def load(name: str) -> Fault:
    """Import one fault.

    Raises:
        ImportError: there is none of that name, or it cannot be imported.
    """
    fault = getattr(importlib.import_module(f"tests.faults.host.{name}"), "FAULT", None)
    if not isinstance(fault, Fault):
        raise ImportError(f"tests/faults/host/{name}.py has no FAULT")
    return fault


def load_all() -> tuple[dict[str, Fault], dict[str, str]]:
    """Return the faults by id, and why others could not be imported."""
    faults, broken = {}, {}
    for name in names():
        try:
            faults[name] = load(name)
        except Exception as exc:  # another's file may be half written
            broken[name] = f"{type(exc).__name__}: {exc}"
    return faults, broken
