"""How many tokens a body of so many bytes usually gives, per route."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from whyspan.engines.records import Job
from whyspan.lru import Lru

_KEPT: Final = 257
_MIN: Final = 30  # prompts of a route before its ratio is used
_MAX_ROUTES: Final = 512
#: Shorter bodies are mostly their JSON frame.
_MIN_BYTES: Final = 256


class Inflation:
    """Medians of prompt tokens per body byte, by service and route."""

    def __init__(self) -> None:
        self._ratios: Lru[tuple[str, str], deque[float]] = Lru(_MAX_ROUTES)

    def usual(self, job: Job, service: str) -> int:
        """Take in a job's prompt and return how many tokens its body usually gives; 0 when that is not known yet."""
        size = job.client.request_bytes
        if size < _MIN_BYTES or not job.prompt_tokens:
            return 0
        key = service, job.client.route
        ratios = self._ratios.get(key)
        if ratios is None:
            ratios = deque(maxlen=_KEPT)
            self._ratios.put(key, ratios)
        usual = int(median(ratios) * size) if len(ratios) >= _MIN else 0
        ratios.append(job.prompt_tokens / size)
        return usual
