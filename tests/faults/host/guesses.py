"""What the baselines guess about a run, out of the files that it left."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from whyspan.recording import Reader

from tests.faults.host import baselines
from tests.faults.host.case import Outcome


def guess(
    outcome: Outcome, samples: Path, recording: Path, *, since_ns: int, seed: int, causes: Sequence[str]
) -> None:
    """Add the baselines' guesses to each case's score.

    Args:
        outcome: The run; its victims are guessed about, its healthy requests say what is usual.
        samples: What the sampler wrote.
        recording: What the agent recorded.
        since_ns: When the agent began to watch.
        seed: Of the guesses by chance.
        causes: All that the bench injects.
    """
    if not outcome.done:
        return
    lines = samples.read_text().split("\n")[:-1] if samples.exists() else []
    series = baselines.Series([json.loads(line) for line in lines])
    reader = Reader(recording)
    try:
        times = baselines.event_times(reader)
    finally:
        reader.close()
    first = min(d.window.begin_ns for d in outcome.done)
    for d in outcome.done:
        rng = random.Random(f"{seed}/{d.case.name}")
        d.score.baselines = {
            baselines.RANDOM: baselines.by_chance(causes, rng, len(d.victims)),
            baselines.COUNTER: baselines.by_counters(series, outcome.healthy, d.victims),
            baselines.EVENTS: baselines.by_events(times, first, since_ns, d.victims),
        }
