"""Turns a run's requests and findings into scores."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from whyspan.model import Finding

from tests.demo.truth import Sent
from tests.faults.host import score
from tests.faults.host.case import Case, Outcome
from tests.faults.host.cut import cut

#: A recording of a case: so many of its slowed requests, at most so long.
RECORDED, RECORDED_NS = 4, 2_000_000_000


def latest(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return findings by trace id; one of an ended request before one of an open one."""
    found: dict[str, Finding] = {}
    for f in findings:
        known = found.get(f.request.trace_id)
        if known is None or known.request.outcome == "open":
            found[f.request.trace_id] = f
    return found


def victims(
    case: Case, sent: Sequence[Sent], on_ns: int, off_ns: int, *, usual_ns: int, objective_ns: int
) -> list[Sent]:
    """Return the requests that a case slowed, or made fail where it does so."""
    members = [s for s in sent if on_ns <= s.start_ns < off_ns]
    if case.fault.failing:
        return [s for s in members if score.is_failed(s)]
    return [s for s in members if score.is_slowed(s, usual_ns, objective_ns)]


def judge(
    outcome: Outcome,
    sent: Sequence[Sent],
    found: Mapping[str, Finding],
    seen_ns: Mapping[str, int],
    *,
    not_explained: int,
    objective_ns: int,
) -> None:
    """Fill in scores and false alarms.

    Args:
        outcome: Of the run, with its victims and healthy requests.
        sent: All requests that the client saw.
        found: The agent's findings by trace id.
        seen_ns: When they reached the store.
        not_explained: Slow ones that the agent says it left out, being over its own limits: so many of those without a
            finding are not held against it.
        objective_ns: The limit that the agent was given.
    """
    outcome.alarms = [
        f
        for s in outcome.healthy
        if s.latency_ns <= objective_ns and (f := found.get(s.trace_id)) is not None and f.slow
    ]
    for d in outcome.done:
        w = d.window
        d.score.members = sum(w.on_ns <= s.start_ns < w.off_ns for s in sent)
        if d.injected is None:
            continue
        if not d.victims and not d.score.error:
            d.score.error = "no request failed" if d.case.fault.failing else "no request was slowed"
        kept = []
        for s in d.victims:
            if s.trace_id not in found and not_explained > 0:
                not_explained -= 1
                d.score.excused += 1
            else:
                kept.append(s)
        d.victims = kept
        d.score.judged = [
            score.judge(s, found.get(s.trace_id), seen_ns.get(s.trace_id), d.score.causes, d.injected.names)
            for s in kept
        ]


def not_explained(store: Path) -> int:
    """Return how many slow or failed requests the agent says it did not explain."""
    db = sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)
    try:
        row = db.execute("SELECT sum(value) FROM counters WHERE name = 'not_explained'").fetchone()
        return int(row[0] or 0)
    finally:
        db.close()


def restarts(log: str) -> int:
    """Return how often one of the agent's processes was started again."""
    return len(re.findall(r"restarting in", log))


def crash(log: str) -> str:
    """Return the end of the first traceback in the agent's log, or nothing."""
    at = log.find("Traceback (most recent call last)")
    if at < 0:
        return ""
    lines = log[at:].splitlines()
    end = next((i for i, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines) - 1)
    return "\n".join(lines[max(end - 4, 0) : end + 1])


def record(outcome: Outcome, recording: Path, baseline: Path, folder: Path) -> None:
    """Write a small recording of each case: of its first slowed requests."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = json.loads(baseline.read_text()) if baseline.exists() else None
    for d in outcome.done:
        chosen = sorted(d.victims, key=lambda s: s.end_ns)[:RECORDED]
        if not chosen:
            continue
        begin = min(s.start_ns for s in chosen)
        ends = [s.end_ns for s in chosen if s.end_ns - begin <= RECORDED_NS] or [chosen[0].end_ns]
        name = d.case.name.replace("/", "-").replace("+", "-")
        # A request's end is told by what follows: the close of its connection.
        cut(recording, folder / f"{name}.rec", begin, max(ends) + 200_000_000, usual)
