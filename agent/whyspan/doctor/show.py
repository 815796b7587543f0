"""Prints a report for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whyspan.containers import short
from whyspan.doctor import attach
from whyspan.doctor.check import Check, State
from whyspan.doctor.report import Library, Report, Server

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

_WORDS = {
    State.OK: "ok",
    State.NOTE: "note",
    State.UNKNOWN: "?",
    State.LIMITED: "LESS",
    State.FAILED: "NO",
}
_VERDICTS = {
    State.OK: "whyspan works here.",
    State.LIMITED: "whyspan works here, with something missing: see LESS and ? above.",
    State.FAILED: "whyspan does not work here: see NO above.",
}
_DIGITS = 8  # of a build id, in the table


def show(report: Report, out: Console, *, everything: bool) -> None:
    """Print it; what is fine of a server only if *everything* is asked for."""
    from rich.table import Table

    table = Table("", "check", "found", box=None, pad_edge=False)
    for c in report.checks:
        if c.group != "probe":
            table.add_row(_WORDS[c.state], c.title, _text(c))
    out.print(table)
    out.print()
    out.print(_probes(report))
    out.print()
    if not report.engines:
        out.print("no inference server found; name one with `whyspan run --pid` or --comm, --unit, --cgroup")
    else:
        out.print(_servers(report.engines))
        _about(report.engines, out, everything)
    out.print(f"\n{_VERDICTS[report.state]}")


def _text(c: Check) -> str:
    """What was found; below it what is lost, and what to do."""
    return "\n".join(filter(None, [c.found, c.lacks and f"lost: {c.lacks}", c.remedy and f"do: {c.remedy}"]))


def _probes(report: Report) -> Table:
    from rich.table import Table

    table = Table("probe", "state", "attached by", "why not", box=None, pad_edge=False)
    for p in report.probes:
        used = ", ".join(dict.fromkeys(s for h in p.hooks.values() for s in h.used))
        table.add_row(p.name, p.state, used, attach.reasons(p))
    return table


def _servers(engines: Iterable[Server]) -> Table:
    from rich.table import Table

    out = Table("process", "service", "found by", "container", "maps", box=None, pad_edge=False)
    for s in engines:
        where = short(s.container_id) or (f"pod {s.pod_uid[:8]}" if s.pod_uid else "-")
        inside = f" ({s.vpid} inside)" if s.vpid else ""
        maps = ", ".join(map(_words, s.libraries)) or s.maps or "-"
        out.add_row(f"{s.tgid}{inside}", s.service, s.rule, where, maps)
    return out


def _words(library: Library) -> str:
    name = library.path.rpartition("/")[2]
    notes = [library.build_id[:_DIGITS]] * bool(library.build_id)
    notes += ["deleted"] * library.deleted + [library.state] * bool(library.state)
    return f"{name} ({', '.join(notes)})" if notes else name


def _about(engines: Iterable[Server], out: Console, everything: bool) -> None:
    """Print what is to be said of the servers; the same of several of one service once."""
    from rich.table import Table

    said: dict[tuple[str, Check], list[int]] = {}
    for s in engines:
        for c in s.checks:
            if everything or c.state is not State.OK:
                said.setdefault((s.service, c), []).append(s.tgid)
    if not said:
        return
    out.print()
    table = Table("", "service", "process", "check", "found", box=None, pad_edge=False)
    for (service, c), tgids in said.items():
        numbers = ", ".join(map(str, tgids[:3])) + (f" and {len(tgids) - 3} more" if len(tgids) > 3 else "")
        table.add_row(_WORDS[c.state], service, numbers, c.title, _text(c))
    out.print(table)
