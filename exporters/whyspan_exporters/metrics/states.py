"""Reads the collector's state, which comes from another process: bounded, and only what has the right type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from whyspan.text import clean

_LABEL_CHARS: Final = 64
_MAX_PROBES: Final = 64
_MAX_ENGINES: Final = 64


def number(value: Any) -> float | None:
    """Return *value* as a finite number; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits, as JSON may have
        return None


def parse(text: str) -> dict[str, Any]:
    """Return a state as the store keeps it; an empty one of what is none."""
    try:
        found = json.loads(text)  # which takes the NaN that Python writes
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(4096)  # the same few hundred, every second
def label(text: str) -> str:
    """Return *text* as a label: one line, at most 64 characters."""
    return clean(text, _LABEL_CHARS)


def table(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table within a state; empty when there is none."""
    found = status.get(name)
    return found if isinstance(found, dict) else {}


def probes(status: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the probes of a collector's state by name, a bounded number of them."""
    found = status.get("probes", ())
    for p in found[:_MAX_PROBES] if isinstance(found, list) else ():
        if isinstance(p, dict) and isinstance(p.get("name"), str):
            yield label(p["name"]), p


def engines(status: Mapping[str, Any]) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """Yield (service, engine, what it says) of a collector's state, a bounded number of them, none that ended."""
    found = status.get("engines", ())
    for e in found[:_MAX_ENGINES] if isinstance(found, list) else ():
        if isinstance(e, dict) and e.get("state") != "ended":
            service, engine = e.get("service"), e.get("engine")
            if isinstance(service, str) and isinstance(engine, str):
                yield label(service), label(engine), e
