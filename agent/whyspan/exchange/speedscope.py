"""Stacks as a file for speedscope: https://www.speedscope.app/file-format-schema.json, type "sampled"."""

from __future__ import annotations

from typing import Any, Final

from whyspan.views.flame import Flame

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def document(view: Flame, name: str) -> dict[str, Any]:
    """Return the file's content; weights are counts, since samples stand for no exact time."""
    numbers: dict[str, int] = {}
    samples = [[numbers.setdefault(f, len(numbers)) for f in frames] for frames, _ in view.stacks]
    weights = [n for _, n in view.stacks]
    return {
        "$schema": _SCHEMA,
        "exporter": "whyspan",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": n} for n in numbers]},
        "profiles": [
            {
                "type": "sampled",
                "name": name,
                "unit": "none",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        ],
    }
