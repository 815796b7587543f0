"""The bench's result: a table, JSON, markdown, and whether the targets are met."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults.host import score
from tests.faults.host.case import Case, Outcome
from tests.faults.host.score import CaseScore

#: Targets.
TOP1, KIND, TOP3, ALARMS, UNKNOWN, VERDICT_S = 0.97, 0.80, 0.99, 0.01, 0.05, 2.0


class Result:
    """All cases of a run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.cases: list[CaseScore] = []
        self.skipped: list[tuple[str, str]] = []
        self.healthy = self.alarms = 0
        self.alarm_sentences: list[str] = []
        self.restarts = 0

    def add(self, outcome: Outcome) -> None:
        """Take a run's outcome."""
        self.cases += [d.score for d in outcome.done]
        self.healthy += len(outcome.healthy)
        self.alarms += len(outcome.alarms)
        self.restarts += outcome.restarts
        self.alarm_sentences += [f"{f.slow_reason}: {f.verdict.sentence}" for f in outcome.alarms]

    def skip(self, cases: Sequence[Case], why: str) -> None:
        """Note cases that cannot be run here."""
        self.skipped += [(c.name, why) for c in cases]

    def fail(self, cases: Sequence[Case], why: str) -> None:
        """Note cases whose server could not be run."""
        known = {c.name for c in self.cases}
        self.cases += [
            CaseScore(c.server, c.fault.id, c.decoy, tuple(c.fault.causes), error=why)
            for c in cases
            if c.name not in known
        ]

    def summary(self) -> dict[str, Any]:
        """Return the figures."""
        judged = [j for c in self.cases for j in c.judged]
        slow_ms = sum(j.latency_ms for j in judged)
        times = [j.verdict_s for j in judged if j.verdict_s is not None]
        kinds = {c.causes[0] for c in self.cases}
        by_kind = {
            k: score.share(c.right for c in self.cases if c.causes[0] == k and not c.error)
            for k in sorted(kinds)
        }
        valid = [c for c in self.cases if not c.error]
        names = sorted({name for c in valid for name in c.baselines})
        return {
            "seed": self.seed,
            "faults": len({c.fault for c in self.cases}),
            "cases": len(self.cases),
            "invalid": len(self.cases) - len(valid),
            "decoys_missing": sum(bool(c.decoy_missing) for c in self.cases),
            "agent_restarts": self.restarts,
            "requests": len(judged),
            "top1": score.share(c.right for c in valid),
            "top3": score.share(c.top3 for c in valid),
            "false_alarm_rate": self.alarms / self.healthy if self.healthy else 0.0,
            "healthy": self.healthy,
            "unknown_share": sum(j.unknown_ms for j in judged) / slow_ms if slow_ms else 0.0,
            "verdict_s_p50": score.percentile(times, 0.5),
            "verdict_s_p99": score.percentile(times, 0.99),
            # Of the requests with the right verdict; a case counts when nearly all of them name the function.
            "code": score.share(c.code_ratio >= score.NEEDED for c in valid if c.code),
            "code_requests": score.share(
                j.code in c.code for c in valid if c.code for j in c.judged if j.right
            ),
            "by_kind": by_kind,
            "baselines": {
                n: {
                    "top1": score.share(c.baseline_right(n, 1) for c in valid),
                    "top3": score.share(c.baseline_right(n, 3) for c in valid),
                }
                for n in names
            },
        }


def _slowed(c: CaseScore) -> str:
    return f"{len(c.judged)}/{c.members}" + (f" ({c.excused} left out)" if c.excused else "")


def show(result: Result, console: Console) -> None:
    """Print the table and the misses."""
    table = Table("case", "cause", "slowed", "top1", "top3", "code", "ms", "verdict s", "misses")
    for c in result.cases:
        times = [j.verdict_s for j in c.judged if j.verdict_s is not None]
        misses = c.error or ", ".join(f"{n}x {said}" for (said, _), n in c.misses().most_common(3))
        table.add_row(
            *(c.name, c.causes[0], _slowed(c), f"{c.top1_ratio:.0%}", f"{c.top3_ratio:.0%}"),
            f"{c.code_ratio:.0%}" if c.code else "",
            *(f"{c.excess_ms:.0f}", f"{score.percentile(times, 0.99):.2f}", misses),
            style="" if c.right else "red",
        )
    console.print(table)
    for c in result.cases:
        for (said, sentence), n in c.misses().most_common(3):
            console.print(f"{c.name}: {n}x {said}: {sentence}", highlight=False, markup=False)
    for sentence in result.alarm_sentences[:10]:
        console.print(f"false alarm: {sentence}", highlight=False, markup=False)
    for name, why in result.skipped:
        console.print(f"{name} skipped: {why}", highlight=False, markup=False)


def as_json(result: Result) -> str:
    """Return the result as JSON."""
    rows = [
        {
            "case": c.name,
            "server": c.server,
            "fault": c.fault,
            "decoy": c.decoy,
            "causes": list(c.causes),
            "right": c.right,
            "top1_ratio": c.top1_ratio,
            "top3_ratio": c.top3_ratio,
            "slowed": len(c.judged),
            "members": c.members,
            "latency_ms": c.excess_ms,
            "on_s": c.on_s,
            "bites": c.bites,
            "decoy_proof": c.decoy_proof or c.decoy_missing,
            "excused": c.excused,
            "code": dict(Counter(j.code for j in c.judged if j.right)),
            "code_ratio": c.code_ratio if c.code else None,
            "error": c.error,
            "requests": [(round(j.latency_ms, 1), j.cause, j.right, j.verdict_s) for j in c.judged],
            "sentence": next((j.sentence for j in c.judged if j.right), ""),
            "misses": [
                {"said": said, "count": n, "sentence": sentence}
                for (said, sentence), n in c.misses().most_common()
            ],
        }
        for c in result.cases
    ]
    whole = {
        **result.summary(),
        "confusion": score.confusion(result.cases),
        "skipped": [{"case": name, "why": why} for name, why in result.skipped],
        "rows": rows,
    }
    return json.dumps(whole, indent=1)


def as_markdown(result: Result) -> str:
    """Return the table for the documentation."""
    lines = ["| fault | server | decoy | cause | slowed | top-1 | top-3 |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {c.fault} | {c.server} | {c.decoy or '-'} | `{c.causes[0]}` | {len(c.judged)} | {c.top1_ratio:.0%} "
        f"| {c.top3_ratio:.0%} |"
        for c in result.cases
    ]
    return "\n".join(lines) + "\n"


def status(result: Result, console: Console) -> int:
    """Print the figures beside the targets; 0 when all are met."""
    s = result.summary()
    worst = min(s["by_kind"].values(), default=0.0)
    checks = (
        ("top-1", f"{s['top1']:.1%}", s["top1"] >= TOP1),
        ("worst kind", f"{worst:.0%}", worst >= KIND),
        ("top-3", f"{s['top3']:.1%}", s["top3"] >= TOP3),
        ("false alarms", f"{s['false_alarm_rate']:.2%} of {s['healthy']}", s["false_alarm_rate"] <= ALARMS),
        ("unknown", f"{s['unknown_share']:.1%} of slow time", s["unknown_share"] <= UNKNOWN),
        ("verdict P99", f"{s['verdict_s_p99']:.2f} s", s["verdict_s_p99"] <= VERDICT_S),
        ("invalid cases", str(s["invalid"]), s["invalid"] == 0),
        ("decoys without proof", str(s["decoys_missing"]), s["decoys_missing"] == 0),
        ("restarts of the agent", str(s["agent_restarts"]), s["agent_restarts"] == 0),
    )
    for name, value, met in checks:
        console.print(f"{'[green]met   [/]' if met else '[red]missed[/]'} {name}: {value}", highlight=False)
    for name, b in s["baselines"].items():
        console.print(f"baseline {name}: top-1 {b['top1']:.0%}, top-3 {b['top3']:.0%}", highlight=False)
    return 0 if s["cases"] and all(met for *_, met in checks) else 1
