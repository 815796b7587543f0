"""What a step usually takes: medians of plain decode steps by batch size, and of the cost of a prompt token."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from whyspan.engines.records import StepRun

_KEPT: Final = 129
_MIN: Final = 9  # steps of a size before its median is used
_MIN_PREFILL: Final = 16  # prompt tokens: fewer tell nothing about the cost of one
_REFRESH: Final = 8
#: Once known, a figure moves by at most this share per refresh: a fault of minutes is not learnt.
_MAX_MOVE: Final = 0.005


class UsualSteps:
    """Medians over the latest plain decode steps, per batch size in powers of two.

    The wall time counted is a step's own stretch, so that overlapping steps are not counted twice.
    """

    def __init__(self) -> None:
        self._kept: dict[int, deque[int]] = {}
        self._median: dict[int, int] = {}
        self._count: dict[int, int] = {}
        self._per_token: deque[float] = deque(maxlen=_KEPT)
        self._token_ns = 0.0
        self._prefills = 0

    def add(self, step: StepRun) -> None:
        """Take in a finished step in which nobody's prompt was computed and nobody asked for anything costly."""
        size = step.batch.bit_length()
        kept = self._kept.setdefault(size, deque(maxlen=_KEPT))
        kept.append(step.wall_ns)
        count = self._count[size] = self._count.get(size, 0) + 1
        if count < _MIN or count % _REFRESH:
            if count == _MIN:
                self._median[size] = int(median(kept))
            return
        seen, known = int(median(kept)), self._median.get(size, 0)
        if count <= _KEPT:
            self._median[size] = seen
        else:
            most = int(known * _MAX_MOVE)
            self._median[size] = min(max(seen, known - most), known + most)

    def add_prefill(self, step: StepRun) -> None:
        """Take in a finished step that computed prompts."""
        tokens = step.prefill_tokens
        if tokens < _MIN_PREFILL:
            return
        self._per_token.append(max(step.wall_ns - self.of(step.batch), 0) / tokens)
        self._prefills += 1
        if self._prefills == _MIN or not self._prefills % _REFRESH:
            self._token_ns = median(self._per_token)

    def expected(self, step: StepRun) -> int:
        """Return what a step of such a batch with such prompts takes, in ns; 0 when too little was seen to tell."""
        plain = self.of(step.batch)
        if not step.prefill_tokens:
            return plain
        prompts = self.prefill(step.prefill_tokens)
        return plain + prompts if prompts else 0

    def prefill(self, tokens: int) -> int:
        """Return what computing so many prompt tokens takes, in ns; 0 when too little was seen to tell."""
        return int(self._token_ns * tokens)

    def of(self, batch: int) -> int:
        """Return what a plain decode step of so many sequences takes, in ns; of the nearest size known, else 0."""
        size = max(batch, 1).bit_length()
        known = self._median.get(size)
        if known is not None or not self._median:
            return known or 0
        return self._median[min(self._median, key=lambda s: (abs(s - size), s))]
