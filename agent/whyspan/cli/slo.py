"""``whyspan slo suggest``: objectives that services can keep, from what was observed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from whyspan.cli._options import bulk_reader, console, store_options
from whyspan.cli._progress import progress

if TYPE_CHECKING:
    from whyspan_exporters.bulk import BulkReader

    from whyspan.config import Slo
    from whyspan.model import Request

#: Requests read to place a quantile within its bucket; the newest.
_MAX_STORED: Final = 20_000
_MAX_NS: Final = (1 << 63) - 1
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


@click.group(name="slo")
def command() -> None:
    """Objectives: limits over which a request is slow."""


@command.command(name="suggest")
@store_options
@click.option("--service", default="", help="Only this service.")
@click.option(
    "--quantile",
    type=click.FloatRange(0.5, 0.9999),
    default=0.99,
    show_default=True,
    help="Share of requests that are to meet an objective; the alerts allow 1% to miss it.",
)
@click.option(
    "--headroom",
    type=click.FloatRange(1.0, 10.0),
    default=1.1,
    show_default=True,
    help="How many times what was observed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def suggest(
    *,
    config_path: Path | None,
    store_path: Path | None,
    service: str,
    quantile: float,
    headroom: float,
    as_json: bool,
) -> None:
    """Suggest objectives for [slo], from quantiles of all requests that the local store knows of.

    They are what the services did, not what their users need: an objective below is kept only by making them faster.
    """
    from whyspan.config import load_config

    with bulk_reader(config_path, store_path) as reader:
        known = _histograms(reader.states())
        counts = reader.counters("slo")
        by_service = _requests(reader, service) if known else {}
    wanted = _Wanted(load_config(config_path).slo, quantile, headroom)
    found = [
        _entry(name, histograms, by_service.get(name, ()), counts, wanted)
        for name, histograms in sorted(known.items())
        if not service or name == service
    ]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        _print(found, quantile)
    else:
        click.echo("no requests" if not service else f"no requests of {service!r}")


def _requests(reader: BulkReader, service: str) -> dict[str, list[Request]]:
    """Return the newest requests in the store, by service."""
    from whyspan.views.select import decode

    out: dict[str, list[Request]] = {}
    with progress("reading", _MAX_STORED) as advance:
        found = reader.raw(since_unix_ns=0, until_unix_ns=_MAX_NS, limit=_MAX_STORED, service=service)
        for number, raw in enumerate(found):
            measured = decode(raw.finding)
            if measured is not None:
                out.setdefault(measured.request.service, []).append(measured.request)
            if number % 500 == 0:
                advance(number, "")
    return out


def _histograms(states: Iterable[Mapping[str, Any]]) -> dict[str, list[list[int]]]:
    """Return by service the histograms of answered requests (see `whyspan.tally`), added up over collectors."""
    from whyspan.tally import BOUNDS_S, NAMES

    width = len(BOUNDS_S) + 1
    out: dict[str, list[list[int]]] = {}
    for state in states:
        for item in state.get("latencies") or ():
            match item:
                case [str(service), str(), "", False, list(counts), list()] if len(counts) == len(NAMES):
                    mine = out.setdefault(service, [[0] * width for _ in NAMES])
                    for total, more in zip(mine, counts, strict=True):
                        if isinstance(more, list) and len(more) == width:
                            total[:] = [a + int(b) for a, b in zip(total, more, strict=True)]
    return {service: rows for service, rows in out.items() if any(rows[0])}


def _values(stored: Iterable[Request], which: int) -> list[float]:
    from whyspan.latency import latency_ms, ttft_ms
    from whyspan.outcome import error_type
    from whyspan.tally import per_chunk_s

    answered = [r for r in stored if r.outcome != "open" and not error_type(r)]
    if which == 0:
        return [latency_ms(r) / 1e3 for r in answered]
    found = [ttft_ms(r) / 1e3 if which == 1 else per_chunk_s(r) for r in answered]
    return [s for s in found if s >= 0]


class _Wanted(NamedTuple):
    slo: Slo
    quantile: float
    headroom: float


class _Counts(NamedTuple):
    good: int
    bad: int


def _kept(counts: Mapping[tuple[str, str], int], service: str, objective: str) -> _Counts:
    return _Counts(
        counts.get((service, f"{objective}/good"), 0), counts.get((service, f"{objective}/bad"), 0)
    )


def _entry(
    service: str,
    histograms: list[list[int]],
    stored: Sequence[Request],
    counts: Mapping[tuple[str, str], int],
    wanted: _Wanted,
) -> dict[str, Any]:
    from whyspan import objectives

    now = wanted.slo.objectives(service)
    out: list[dict[str, Any]] = []
    for which, key in enumerate(objectives.KEYS):
        if not any(histograms[which]):
            continue
        values = _values(stored, which)
        s = objectives.latency(key, histograms[which], values, wanted.quantile, wanted.headroom)
        kept = _kept(counts, service, key.removesuffix("_ms"))
        current = float(getattr(now, key))
        out.append(
            {
                "key": key,
                "requests": s.requests,
                "enough": s.enough,
                "observed_ms": s.observed_ms,
                "suggested_ms": s.suggested_ms,
                "current_ms": current or None,
                "current_kept": kept.good / sum(kept) if current and sum(kept) else None,
            }
        )
    success = _kept(counts, service, "success")
    return {
        "service": service,
        "quantile": wanted.quantile,
        "objectives": out,
        "success": success.good / sum(success) if sum(success) else None,
        "suggested_success": objectives.success(*success) or None,
    }


def _print(found: list[dict[str, Any]], quantile: float) -> None:
    from rich import box
    from rich.table import Table

    from whyspan.text import clean

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("service")
    table.add_column("objective")
    for title in ("requests", f"P{quantile * 100:g} ms", "suggested ms", "now ms", "kept now"):
        table.add_column(title, justify="right")
    few = False
    for entry in found:
        for o in entry["objectives"]:
            few |= not o["enough"]
            table.add_row(
                clean(entry["service"], 24),
                o["key"],
                f"{o['requests']}{'' if o['enough'] else ' (few)'}",
                f"{o['observed_ms']:.4g}",
                f"{o['suggested_ms']:g}",
                f"{o['current_ms']:g}" if o["current_ms"] else "-",
                f"{o['current_kept']:.2%}" if o["current_kept"] is not None else "-",
            )
        if entry["success"] is not None:
            best = entry["suggested_success"]
            table.add_row(
                clean(entry["service"], 24),
                "success",
                "",
                f"{entry['success']:.2%}",
                f"{best:.2%}" if best else "-",
                "",
                "",
            )
    out = console()
    out.print(table)
    if few:
        out.print("few: too few requests for this quantile; look again later\n")
    out.print(_toml(found), highlight=False)


def _toml(found: list[dict[str, Any]]) -> str:
    lines = ["# for whyspan.toml"]
    for entry in found:
        name = entry["service"]
        lines.append(f"[slo.services.{name if _BARE_KEY.fullmatch(name) else json.dumps(name)}]")
        lines += [f"{o['key']} = {o['suggested_ms']:g}" for o in entry["objectives"]]
    return "\n".join(lines)
