"""How the commands show what an engine said of a request, and who is to blame."""

from __future__ import annotations

from typing import Final

from whyspan.model import Culprit, EngineFacts, PhaseTime
from whyspan.text import clean

_BAR_WIDTH: Final = 24
_MAX_PHASES: Final = 12
#: Kinds whose name alone does not say what it names.
_NAMED_BY_KIND: Final = frozenset({"cpu", "request", "model"})


def culprit_name(kind: str, name: str) -> str:
    """Return a name for a table's cell."""
    return clean((f"{kind} {name}" if kind in _NAMED_BY_KIND else name).strip(), 32)


def culprit(culprit: Culprit) -> str:
    """Return everything known of the culprit, its trace too, for ``whyspan explain``."""
    ids = [f"process {culprit.tgid}"] * bool(culprit.tgid) + [f"thread {culprit.tid}"] * bool(culprit.tid)
    ids += [f"trace {clean(culprit.trace_id, 32)}"] * bool(culprit.trace_id)
    text = f"{clean(culprit.kind, 20)} {clean(culprit.name, 80)}".strip()
    text += f" ({', '.join(ids)})" if ids else ""
    return text + (f": {clean(culprit.detail, 160)}" if culprit.detail else "")


def lines(e: EngineFacts) -> list[str]:
    """Return who served the request, and its tokens and steps."""
    name = f"{clean(e.engine, 40)} {clean(e.version, 40)}".strip() or "unknown"
    who = [f"engine {name}, marks {clean(e.state, 20)}" if e.state else f"engine {name}"]
    who += [f"process {e.core_tgid}"] * bool(e.core_tgid) + [f"model {clean(e.model, 80)}"] * bool(e.model)
    who += [f"request {clean(e.request_id, 128)}"] * bool(e.request_id)
    who += [f"template {clean(e.template, 64)}"] * bool(e.template)
    did = []
    if e.prompt_tokens:
        did.append(f"{e.prompt_tokens} prompt tokens, {e.cached_tokens} of them cached")
    did.append(f"{e.output_tokens} output tokens" + (f" in {e.n} completions" if e.n > 1 else ""))
    did += [f"{e.steps} steps"] + [f"batch {e.batch}"] * bool(e.batch)
    did += [f"KV pool {e.kv_usage:.0%} used"] * (e.kv_usage >= 0)
    if e.preemptions or e.recomputed_tokens:
        times = "preempted once" if e.preemptions == 1 else f"preempted {e.preemptions} times"
        did.append(f"{times}, {e.recomputed_tokens} tokens recomputed")
    return [", ".join(who), "  " + ", ".join(did)]


def phase_rows(phases: list[PhaseTime], start_ns: int, wall_ns: int, block: str = "█") -> list[str]:
    """Return the table of phases: when, how long, a bar. Times in ms.

    Args:
        phases: In order.
        start_ns: Where the request starts (CLOCK_MONOTONIC).
        wall_ns: How long it took.
        block: What bars are made of.
    """
    rows = [f"  {'phase':<10} {'at ms':>10} {'for ms':>10}"]
    wall = max(wall_ns, 1)
    for p in phases[:_MAX_PHASES]:
        first = min(max(round((p.start_ns - start_ns) * _BAR_WIDTH / wall), 0), _BAR_WIDTH - 1)
        last = min(max(round((p.end_ns - start_ns) * _BAR_WIDTH / wall), first + 1), _BAR_WIDTH)
        at_ms, for_ms = (p.start_ns - start_ns) / 1e6, (p.end_ns - p.start_ns) / 1e6
        bar = " " * first + block * (last - first)
        rows.append(f"  {clean(p.name, 10):<10} {at_ms:>10.2f} {for_ms:>10.2f}  {bar}")
    return rows
