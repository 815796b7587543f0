"""``whyspan flame``: the code that slow requests spent their time in, for flame graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whyspan.cli._options import open_reader, store_options
from whyspan.errors import StoreError, WhyspanError
from whyspan.times import duration_ns

if TYPE_CHECKING:
    from whyspan_exporters.reader import Reader

    from whyspan.model import Finding


@click.command(name="flame")
@store_options
@click.argument("name", metavar="[ID]", default="")
@click.option("--service", default="", help="Only this service.")
@click.option("--cause", default="", help="Only this cause, or all below it (cpu, io, ...).")
@click.option("--since", default="", metavar="AGE", help="Only requests of the last 90s, 10m, 2h, 7d.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=2000, show_default=True, help="Requests at most."
)
@click.option(
    "--blocked", is_flag=True, help="Where threads were blocked for long, instead of what they executed."
)
@click.option(
    "--speedscope",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a file for speedscope instead of folded text.",
)
def command(
    *,
    config_path: Path | None,
    store_path: Path | None,
    name: str,
    service: str,
    cause: str,
    since: str,
    limit: int,
    blocked: bool,
    speedscope: Path | None,
) -> None:
    """Print the stacks sampled in slow and failed requests as folded text: one stack per line, outermost frame first.

    Of one request when ID is given (as `whyspan explain` takes it), else of all that the options leave.
    """
    from whyspan.exchange import speedscope as format_
    from whyspan.views import flame

    with open_reader(config_path, store_path) as reader:
        findings = _findings(reader, name, service=service, cause=cause, since=since, limit=limit)
    kind = flame.BLOCKED if blocked else flame.RUNNING
    view = flame.flame(findings, cause=cause, kind=kind)
    if not view.stacks:
        what = "long waits" if blocked else "samples"
        raise StoreError(
            f"no {what} in {view.requests} requests; `whyspan probes` says whether there is a sampler"
        )
    if view.without:
        click.echo(f"whyspan: {view.without} of {view.requests} requests have no such stacks", err=True)
    if speedscope is None:
        for line in flame.folded(view):
            click.echo(line)
        return
    title = " ".join(filter(None, ("whyspan", name or service, cause, kind)))
    try:
        speedscope.write_text(json.dumps(format_.document(view, title)), encoding="utf-8")
    except OSError as exc:
        raise WhyspanError(f"cannot write {speedscope}: {exc.strerror}") from exc


def _findings(
    reader: Reader, name: str, *, service: str, cause: str, since: str, limit: int
) -> list[Finding]:
    from whyspan.clock import now_unix_ns

    if name:
        found = reader.find(name)
        if not found:
            raise StoreError(f"no request {name}: `whyspan slow --all` lists what is stored")
        return [s.finding for s in found]
    oldest = now_unix_ns() - duration_ns(since) if since else 0
    newest = reader.newest(
        service=service, cause=cause, since_unix_ns=oldest, limit=limit, ordinary=False, failed=None
    )
    return [s.finding for s in newest]
