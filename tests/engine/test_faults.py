"""Some of the fault bench's cases on the stub engine; ``python -m tests.faults`` runs them all, and a real vLLM's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from rich.console import Console

from tests.faults import engines
from tests.faults.runner import Score

CASES = ("prefill", "queue", "kv", "zombie", "transfer", "straggler", "diverged", "frozen")
#: A busy machine has causes of its own; the bench's own floor is 0.95.
FLOOR = 0.8


@pytest.fixture(scope="module")
def scores() -> Iterator[dict[str, Score]]:
    cpus = os.sched_getaffinity(0)
    try:
        yield {s.case.name: s for s in engines.lab(CASES, Console(width=150))}
    finally:
        os.sched_setaffinity(0, cpus)


@pytest.mark.parametrize("name", CASES)
def test_the_cause_and_the_culprit_are_named(scores: dict[str, Score], name: str) -> None:
    score = scores[name]
    assert score.slowed >= 5, "the fault slowed too few requests to judge"
    assert score.unexplained <= (1 - FLOOR) * score.slowed
    assert score.ratio >= FLOOR, score.misses
    assert score.open_seen, "nothing was reported while it lasted"
