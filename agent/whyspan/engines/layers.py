"""An unusual layer of the model, from a sampled forward pass."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Final

from whyspan.marks import Layers

#: So many times the median of its kind is unusual, and so many layers of a kind make a median.
OUTLIER: Final = 3.0
MIN_LAYERS: Final = 3
_MS: Final = 1_000_000


def outlier(sample: Layers) -> str:
    """Return which block of which layer took unusually long, in words; empty when none did.

    Attention and MLP blocks are looked at first: they say more than the layer that holds them.
    """
    by_kind: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, kind, ns in sample.rows:
        by_kind[kind].append((ns, number))
    for kind in sorted(by_kind, key=lambda k: k == "layer"):
        rows = by_kind[kind]
        usual = median(ns for ns, _ in rows)
        worst, number = max(rows)
        if len(rows) >= MIN_LAYERS and worst > OUTLIER * usual > 0:
            what = f"layer {number}" if kind == "layer" else f"the {kind} of layer {number}"
            return (
                f"{what} took {worst / _MS:.1f} ms of a sampled pass, the median {kind} {usual / _MS:.1f} ms"
            )
    return ""
