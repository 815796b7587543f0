"""How even the tokens of a request came, as its engine tells: the times between the ends of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from whyspan.engines.records import Job
from whyspan.engines.table import EngineTable

_MINUTE_NS: Final = 60_000_000_000


def token_gaps_s(table: EngineTable, jobs: Iterable[Job]) -> list[float]:
    """Return the times between tokens of *jobs*, in s, each job's in order; none where no engine tells.

    A step may make several tokens of a sequence (speculation): they came together. Of a long answer it is the last
    minute.
    """
    out: list[float] = []
    for job in jobs:
        if job.first_token_ns:
            since_ns = max(job.first_token_ns, job.last_token_ns - _MINUTE_NS)
            steps = table.steps_of(job, since_ns - 1, job.last_token_ns + 1)
            ends = [s.done_ns for s in steps if since_ns <= s.done_ns <= job.last_token_ns]
            out += [(b - a) / 1e9 for a, b in pairwise(ends) if b > a]
    return out
