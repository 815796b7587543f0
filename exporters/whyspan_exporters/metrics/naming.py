"""Names as Prometheus has them: what its own translator makes of an OTLP name and unit, so that queries hold for both.

Source: prometheus/otlptranslator, metric_namer.go and label_namer.go (suffixes on, no UTF-8), as of 2026.
"""

from __future__ import annotations

import re
from typing import Final

# Only units that the catalogue may use; a test refuses others.
UNITS: Final = {"s": "seconds", "ms": "milliseconds", "By": "bytes", "Hz": "hertz", "%": "percent", "1": ""}
_PER: Final = {"s": "second", "m": "minute", "h": "hour", "d": "day"}
_NOT_IN_NAMES: Final = re.compile("[^a-zA-Z0-9:]+")
_NOT_IN_LABELS: Final = re.compile("[^a-zA-Z0-9_]")


def metric_name(name: str, unit: str, kind: str) -> str:
    """Return the name of a series: ``a.b`` in s as a counter is ``a_b_seconds_total``.

    Of a histogram it is the base, to which ``_bucket``, ``_sum`` and ``_count`` are appended.

    Args:
        name: As OTLP has it.
        unit: UCUM; annotations in braces are no units.
        kind: counter, updown, gauge or histogram.
    """
    tokens = [t for t in _NOT_IN_NAMES.split(name) if t]
    for suffix in unit_suffixes(unit):
        if suffix not in tokens:
            tokens.append(suffix)
    if kind == "counter":
        tokens = [t for t in tokens if t != "total"] + ["total"]
    if unit == "1" and kind == "gauge":
        tokens = [t for t in tokens if t != "ratio"] + ["ratio"]
    return "_".join(tokens)


def unit_suffixes(unit: str) -> list[str]:
    """Return what the unit adds to a name: ``By/s`` adds ``bytes`` and ``per_second``."""
    main, _, per = unit.partition("/")
    out = []
    if main and "{" not in main and (suffix := UNITS[main]):
        out.append(suffix)
    if per and "{" not in per:
        out.append(f"per_{_PER[per]}")
    return out


def label_name(name: str) -> str:
    """Return the name of a label: ``whyspan.service`` is ``whyspan_service``."""
    return _NOT_IN_LABELS.sub("_", name)
