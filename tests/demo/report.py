"""The verdicts of the agent against the truth of the client: a table, and result.json."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.demo.faults import FAULTS, World
from tests.demo.truth import Truth

MIN_SLOWED = 30
MIN_RIGHT_RATIO = 0.90
MAX_FALSE_RATIO = 0.02

Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Score:
    """One fault: how many requests it slowed, how many were named rightly, what the others got."""

    id: str
    title: str
    cause: str
    slowed: int
    members: int
    right: int
    excess_ms: float
    sample: str
    misses: Counter[str]

    @property
    def ratio(self) -> float:
        return self.right / self.slowed if self.slowed else 0.0


def score(truth: Truth, rows: Rows, world: World, culprits: dict[str, set[int]]) -> list[Score]:
    """Score every fault that was injected. A slowed request that the agent does not list counts as wrong."""
    scores = []
    for fault in FAULTS:
        slowed = truth.slowed.get(fault.id, [])
        right, misses = [], Counter[str]()
        for sent in slowed:
            verdict = (rows.get(sent.trace_id) or {}).get("verdict")
            if verdict is None:
                misses["not listed"] += 1
            elif verdict["cause"] != fault.cause:
                misses[verdict["cause"] or "no cause"] += 1
            elif not fault.names_culprit(verdict.get("culprit") or {}, world, culprits[fault.id]):
                misses[f"culprit {json.dumps(verdict.get('culprit'))}"] += 1
            else:
                right.append(sent)
        excess = [(s.latency_ns - truth.usual_ns) / 1e6 for s in slowed]
        by_excess = sorted(right, key=lambda s: s.latency_ns)
        scores.append(
            Score(
                fault.id,
                fault.title,
                fault.cause,
                len(slowed),
                len(truth.members.get(fault.id, [])),
                len(right),
                median(excess) if excess else 0.0,
                by_excess[len(by_excess) // 2].trace_id if by_excess else "",
                misses,
            )
        )
    return scores


def false_alarms(truth: Truth, rows: Rows) -> list[str]:
    """Trace ids of healthy requests that got a cause."""
    return [
        s.trace_id
        for s in truth.healthy
        if ((rows.get(s.trace_id) or {}).get("verdict") or {}).get("cause", "unknown")
        not in {"", "unknown", None}
    ]


def passed(scores: list[Score], healthy: int, alarms: int, with_agent: bool) -> bool:
    enough = all(s.slowed >= MIN_SLOWED for s in scores) and healthy > 0
    if not with_agent:
        return enough
    return enough and all(s.ratio >= MIN_RIGHT_RATIO for s in scores) and alarms <= MAX_FALSE_RATIO * healthy


def print_table(console: Console, scores: list[Score], truth: Truth, alarms: int, with_agent: bool) -> None:
    table = Table(title="whyspan demo: client's clock against the agent's verdicts", title_justify="left")
    for column, justify in (
        ("fault", "left"),
        ("cause", "left"),
        ("slowed", "right"),
        ("median excess", "right"),
    ):
        table.add_column(column, justify="right" if justify == "right" else "left")
    if with_agent:
        table.add_column("named first, right culprit", justify="right")
        table.add_column("ratio", justify="right")
    for s in scores:
        cells = [s.title, s.cause, f"{s.slowed} of {s.members}", f"{s.excess_ms:.0f} ms"]
        if with_agent:
            colour = "green" if s.ratio >= MIN_RIGHT_RATIO else "red"
            cells += [str(s.right), f"[{colour}]{s.ratio:.1%}[/]"]
        table.add_row(*cells)
    console.print(table)
    usual = f"median {truth.usual_ns / 1e6:.1f} ms, P99 {truth.limit_ns / 1e6:.1f} ms"
    line = f"healthy requests: {len(truth.healthy)}, {usual}"
    console.print(line + (f"; false alarms: {alarms}" if with_agent else ""), highlight=False)
    for s in scores:
        if with_agent and s.misses:
            console.print(
                f"  {s.id} misses: " + ", ".join(f"{n} x {what}" for what, n in s.misses.most_common(5))
            )


def write_result(path: Path, scores: list[Score], healthy: int, alarms: int, seconds: float) -> None:
    faults = [{"id": s.id, "slowed": s.slowed, "right": s.right, "ratio": round(s.ratio, 4)} for s in scores]
    result = {"faults": faults, "healthy": healthy, "false_alarms": alarms, "seconds": round(seconds, 1)}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
