"""``whyspan replay``: the whole path on a recording, with the same verdicts as live."""

from __future__ import annotations

import json
from pathlib import Path

import click

from whyspan.cli._options import console
from whyspan.cli._progress import progress
from whyspan.text import clean


@click.command(name="replay")
@click.argument("recording", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--all", "ordinary", is_flag=True, help="Also the sampled requests, neither slow nor failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the findings as `explain` has them.")
def command(*, recording: Path, ordinary: bool, as_json: bool) -> None:
    """Run recorder, critical path, causes and verdict on RECORDING."""
    from whyspan.model import FAILED, UNFINISHED
    from whyspan.pipeline.replay import replay

    with progress("replaying", 1.0) as advance:
        result = replay(recording, lambda ratio: advance(ratio, ""))
    findings = [f for f in result.findings if ordinary or f.slow or f.request.outcome in FAILED]
    if result.torn:
        click.echo(f"whyspan: {recording}: {result.torn}; replayed what came before", err=True)
    if as_json:
        import msgspec

        click.echo(json.dumps([msgspec.to_builtins(f) for f in findings], indent=2))
        return
    from rich.table import Table

    out = console()
    table = Table(
        "trace", "service", "latency", "status", "cause", "excess", "culprit", box=None, pad_edge=False
    )
    for f in findings:
        v, r = f.verdict, f.request
        judged = f.slow or r.outcome in FAILED
        table.add_row(
            r.trace_id[:12],
            clean(r.service, 24),
            f"{f.wall_ns / 1e6:.0f} ms",
            r.outcome if r.outcome in UNFINISHED else str(r.status or r.outcome),
            v.cause if judged else "-",
            f"{v.excess_ms:.0f} ms" if f.slow else "",
            clean(v.culprit.name, 40),
        )
    out.print(table)
    out.print(f"\n{result.events:,} events in {result.batches:,} batches, {len(findings)} findings")
