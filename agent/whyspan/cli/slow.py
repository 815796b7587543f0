"""``whyspan slow``: the newest slow requests and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from whyspan.cli._options import console, open_reader, store_options
from whyspan.times import duration_ns

if TYPE_CHECKING:
    from whyspan_exporters.listed import Listed
    from whyspan_exporters.reader import Stored

_TRACE_DIGITS = 8  # enough for `whyspan explain`
_WIDE = 130  # columns of the terminal


@click.command(name="slow")
@store_options
@click.option("--service", default="", help="Only this service.")
@click.option("--cause", default="", help="Only this cause, or all below it (cpu, io, ...).")
@click.option("--since", default="", metavar="AGE", help="Only requests of the last 90s, 10m, 2h, 7d.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option(
    "--failed/--no-failed",
    default=None,
    help="Only requests that failed (an error status, cut off, killed), or none of them.",
)
@click.option("--all", "ordinary", is_flag=True, help="Also the sampled requests, neither slow nor failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    config_path: Path | None,
    store_path: Path | None,
    service: str,
    cause: str,
    since: str,
    limit: int,
    failed: bool | None,
    ordinary: bool,
    as_json: bool,
) -> None:
    """List the newest slow and failed requests with the cause of each."""
    from whyspan_exporters.filters import Filter

    from whyspan.clock import now_unix_ns

    oldest = now_unix_ns() - duration_ns(since) if since else 0
    with open_reader(config_path, store_path) as reader:
        if as_json:
            found = reader.newest(
                service=service,
                cause=cause,
                since_unix_ns=oldest,
                limit=limit,
                ordinary=ordinary,
                failed=failed,
            )
            click.echo(json.dumps([_entry(s) for s in found], indent=2))
            return
        wanted = Filter(service=service, cause=cause, since_unix_ns=oldest, ordinary=ordinary, failed=failed)
        rows = reader.requests.page(wanted, limit=limit, count=False).rows
    if rows:
        _print_table(rows)
    else:
        kind = "failed " if failed else "" if ordinary else "slow or failed " if failed is None else "slow "
        click.echo(f"no {kind}requests")


def _entry(stored: Stored) -> dict[str, Any]:
    from whyspan import clock, phases

    finding = stored.finding
    request, verdict = finding.request, finding.verdict
    return {
        "trace_id": request.trace_id,
        "trace_id_source": request.trace_id_source,
        "service": request.service,
        "start": clock.rfc3339(stored.start_unix_ns),
        "latency_ms": finding.wall_ns / 1e6,
        "ttft_ms": (request.first_ns - request.start_ns) / 1e6 if request.first_ns else None,
        "status": request.status,
        "outcome": request.outcome,
        "ended_by": request.ended_by,
        "phase": finding.phase,
        "engine_phase": phases.of_cause(finding) if finding.phases else "",
        "engine_request_id": finding.engine.request_id if finding.engine is not None else "",
        "verdict": {
            "cause": verdict.cause,
            "excess_ms": verdict.excess_ms,
            "share": verdict.share,
            "confidence": verdict.confidence,
            "culprit": {
                "kind": verdict.culprit.kind,
                "name": verdict.culprit.name,
                "tgid": verdict.culprit.tgid,
                "tid": verdict.culprit.tid,
                "detail": verdict.culprit.detail,
                "trace_id": verdict.culprit.trace_id,
                "span_id": verdict.culprit.span_id,
            },
        },
        "accounted_ratio": finding.accounted_ns / finding.wall_ns if finding.wall_ns else 1.0,
        "lost_events": finding.lost_events,
    }


def _print_table(rows: list[Listed]) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [c for c in _COLUMNS if out.width >= _WIDE or not c.wide_only]
    for column in shown:
        table.add_column(
            column.title,
            justify="right" if column.number else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=column.min_width or None,
        )
    for row in rows:
        cells = _cells(row, narrow=out.width < _WIDE)
        table.add_row(*(cells[column.title] for column in shown))
    out.print(table)


class _Column(NamedTuple):
    title: str
    number: bool = False
    wide_only: bool = False
    min_width: int = 0


_COLUMNS = (
    _Column("start (UTC)", min_width=14),
    _Column("service"),
    _Column("route", wide_only=True),
    _Column("status", number=True, wide_only=True, min_width=6),
    _Column("total ms", number=True, min_width=8),
    _Column("ttft ms", number=True, wide_only=True),
    _Column("phase", wide_only=True),
    _Column("cause"),
    _Column("excess ms", number=True, wide_only=True),
    _Column("share", number=True, wide_only=True),
    _Column("conf.", number=True, wide_only=True),
    _Column("culprit"),
    _Column("trace", min_width=_TRACE_DIGITS),
)


def _cells(row: Listed, *, narrow: bool) -> dict[str, str]:
    from whyspan_exporters.schema import FAILED_BIT

    from whyspan import clock
    from whyspan.cli import _engine
    from whyspan.model import UNFINISHED
    from whyspan.text import clean

    status = row.outcome if row.outcome in UNFINISHED else row.status or row.outcome
    cause = row.cause if row.slow else "(not slow)"
    if narrow and row.slow & FAILED_BIT:  # there is no column for it
        cause = f"{status}: {cause}"
    return {
        "start (UTC)": clock.rfc3339(row.start_unix_ns)[5:19].replace("T", " "),
        "service": clean(row.service, 24),
        "route": clean(f"{row.method} {row.route}", 32),
        "status": clean(str(status), 10),
        "total ms": f"{row.latency_ns / 1e6:.1f}",
        "ttft ms": f"{row.ttft_ns / 1e6:.1f}" if row.ttft_ns is not None else "-",
        "phase": clean(row.phase, 10) or "-",
        "cause": clean(cause, 32),
        "excess ms": f"{row.excess_ms:.1f}",
        "share": f"{row.share:.0%}",
        "conf.": f"{row.confidence:.2f}",
        "culprit": _engine.culprit_name(row.culprit_kind, row.culprit),
        "trace": clean(row.trace_id[:_TRACE_DIGITS], _TRACE_DIGITS),
    }
