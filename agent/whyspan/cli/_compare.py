"""Prints a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table

from whyspan.text import clean

if TYPE_CHECKING:
    from rich.console import Console

    from whyspan.views.comparison import CauseChange, CompareView, Gate, Metric, Side
    from whyspan.views.resample import Interval

_ROWS: Final = 12
#: Changes below this are not worth a row unless they are proven.
_FLOOR_MS: Final = 0.05
_GATES: Final = {
    "ok": "within the limit",
    "worse": "WORSE THAN THE LIMIT",
    "unclear": "not shown to be within the limit",
}


def show(view: CompareView, out: Console) -> None:
    """Print who is compared, the figures, the causes, and what the gates say."""
    from whyspan import clock

    for name, side in (("A", view.a), ("B", view.b)):
        out.print(_who(name, side, view.weighted, clock.rfc3339))
    if not view.weighted and view.a.stored and view.b.stored:
        out.print(
            "The store did not count all requests then: figures are of the stored ones, of which more are slow."
        )
    out.print()
    for sentence in sentences(view):
        out.print(sentence)
    if view.metrics:
        out.print(_metrics(view.metrics))
    shown = [c for c in view.causes if abs(c.change.value) >= _FLOOR_MS or c.state != "same"][:_ROWS]
    if shown:
        out.print(_causes(shown, len(view.causes)))
        if len(view.causes) > len(shown):
            out.print(f"{len(view.causes) - len(shown)} more causes with less change (--json has them)\n")
    for gate in view.gates:
        limit = _amount(gate.limit, gate.unit)
        out.print(f"gate {gate.label} +{limit}: {_change(gate.change, gate.unit)}: {_GATES[gate.state]}")


def sentences(view: CompareView) -> list[str]:
    """Return what a hurried reader needs."""
    out = []
    if view.too_few:
        out.append(f"Too few requests to tell: {view.too_few}.")
        if not view.causes:
            return out
    elif worse := [g for g in view.gates if g.state == "worse"]:
        out.append(f"B is worse: {' and '.join(map(_rise, worse))}.")
    elif proven := [g for g in view.gates if g.change.low > 0]:
        out.append(f"B is worse, within the limits: {' and '.join(map(_rise, proven))}.")
    elif doubtful := [g for g in view.gates if g.change.value > g.limit]:
        out.append(f"B is not shown to be worse: {' and '.join(map(_rise, doubtful))}, which may be chance.")
    else:
        out.append("B is not worse in P99 or errors.")
    guilty = [c for c in view.causes if c.state == "worse"][:3]
    better = [c for c in view.causes if c.state == "better"][:3]
    if guilty:
        out.append(f"More time per request goes to {_list(guilty)}.")
    if better:
        out.append(f"Less goes to {_list(better)}.")
    if not guilty and not better:
        out.append("No cause takes significantly more or less time.")
    return out


def _rise(gate: Gate) -> str:
    by = f"{gate.change.value * 100:.2f} points" if gate.unit == "ratio" else f"{gate.change.value:.1f} ms"
    verb = "are" if gate.key == "errors" else "is"
    return f"{gate.label} {verb} {by} higher"


def _list(causes: list[CauseChange]) -> str:
    return ", ".join(f"{clean(c.cause, 40)} ({c.change.value:+.1f} ms)" for c in causes)


def _who(name: str, side: Side, weighted: bool, moment: Callable[[int], str]) -> str:
    times = ""
    if side.stored:
        first, last = (
            moment(int(ms * 1e6))[:19].replace("T", " ") for ms in (side.first_unix_ms, side.last_unix_ms)
        )
        times = f", {first} to {last} UTC"
    stand = f" of {side.stands_for:,.0f}" if weighted and side.stored else ""
    kinds = f"({side.slow:,} slow, {side.failed:,} failed)"
    return f"{name}  {side.selector or '(all)'}: {side.stored:,}{stand} requests {kinds}{times}"


def _metrics(metrics: list[Metric]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", min_width=14)
    for title in ("A", "B", "change", "95% interval"):
        table.add_column(title, justify="right")
    for m in metrics:
        sides = [_amount(side.value, m.unit) for side in (m.a, m.b)]
        table.add_row(m.label, *sides, _signed(m.change.value, m.unit), _range(m.change, m.unit))
    return table


def _causes(causes: list[CauseChange], tested: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms per request", no_wrap=True, max_width=32, overflow="ellipsis")
    for title in ("A", "B", "change", "95% interval", f"p (of {tested} causes)"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for c in causes:
        sides = [f"{side:.2f}" for side in (c.a_ms, c.b_ms)]
        interval = f"{c.change.low:+.2f} to {c.change.high:+.2f}"
        p = "<0.001" if c.p < 0.001 else f"{c.p:.3f}"
        state = "" if c.state == "same" else c.state
        table.add_row(clean(c.cause, 40), *sides, f"{c.change.value:+.2f}", interval, p, state)
    return table


def _change(change: Interval, unit: str) -> str:
    return f"{_signed(change.value, unit)} (95%: {_range(change, unit)})"


def _range(change: Interval, unit: str) -> str:
    return f"{_signed(change.low, unit)} to {_signed(change.high, unit)}"


def _signed(value: float, unit: str) -> str:
    return f"{value * 100:+.2f} points" if unit == "ratio" else f"{value:+.1f} ms"


def _amount(value: float, unit: str) -> str:
    return f"{value * 100:.2f}%" if unit == "ratio" else f"{value:.1f} ms"
