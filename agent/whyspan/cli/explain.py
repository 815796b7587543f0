"""``whyspan explain``: one request, nanosecond by nanosecond, and the verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whyspan.cli._options import open_reader, store_options
from whyspan.errors import StoreError, WhyspanError

if TYPE_CHECKING:
    from whyspan_exporters.reader import Reader, Stored

    from whyspan.model import Finding


_LISTED = 8
_CAUSE_ROWS = 12
_FRAMES = 12
_FILE: click.Path = click.Path(dir_okay=False, path_type=Path)


@click.command(name="explain")
@click.argument("request_id", metavar="ID")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", "html_path", type=_FILE, metavar="FILE", help="Write one page that stands alone.")
@click.option(
    "--perfetto", "perfetto_path", type=_FILE, metavar="FILE", help="Write a trace for ui.perfetto.dev."
)
def command(
    *,
    request_id: str,
    config_path: Path | None,
    store_path: Path | None,
    as_json: bool,
    html_path: Path | None,
    perfetto_path: Path | None,
) -> None:
    """Explain the request ID: a trace id, an x-request-id, or the engine's own id of the request.

    Of a trace id and of an engine's id the beginning will do (at least 4 characters).
    """
    with open_reader(config_path, store_path) as reader:
        stored = _one(reader, request_id)
        if html_path is not None:
            _write_html(reader, stored, config_path, html_path)
        if perfetto_path is not None:
            _write_perfetto(reader, stored, perfetto_path)
    written = [path for path in (html_path, perfetto_path) if path is not None]
    for path in written:
        click.echo(f"wrote {path}", err=as_json)
    if as_json:
        click.echo(json.dumps(_document(stored), indent=2))
    elif not written:
        utf = (sys.stdout.encoding or "").lower().startswith("utf")
        click.echo("\n".join(report(stored, "█" if utf else "#")))


def _one(reader: Reader, name: str) -> Stored:
    """Return the finding that *name* means; of several requests of one trace, the slowest.

    Raises:
        StoreError: None, or requests of several traces.
    """
    found = reader.find(name)
    if not found:
        raise StoreError(
            f"no request {name}: give a trace id, an engine's request id, the first 4 or more characters of either,"
            " or an x-request-id;"
            " `whyspan slow --all` lists what is stored"
        )
    traces = sorted({s.finding.request.trace_id for s in found})
    if len(traces) > 1:
        shown = ", ".join(traces[:_LISTED]) + (", ..." if len(traces) > _LISTED else "")
        raise StoreError(f"{name} is ambiguous: {shown}")
    if len(found) > 1:
        others = ", ".join(s.id for s in found[1:])
        click.echo(f"whyspan: the slowest of {len(found)} requests of this trace; others: {others}", err=True)
    return found[0]


def _write_html(reader: Reader, stored: Stored, config_path: Path | None, path: Path) -> None:
    from whyspan.config import load_config
    from whyspan.page import html
    from whyspan.views import request

    page = load_config(config_path).page
    view = request.find(reader, stored.id, trace_url=page.trace_url, runbook_url=page.runbook_url)
    if view is None:  # the oldest go first, and it went just now
        raise StoreError(f"the request {stored.id} is no longer in the store")
    try:
        path.write_text(html.render(view), encoding="utf-8")
    except OSError as exc:
        raise WhyspanError(f"cannot write {path}: {exc.strerror}") from exc


def _write_perfetto(reader: Reader, stored: Stored, path: Path) -> None:
    from whyspan.exchange import perfetto
    from whyspan.views import request

    view = request.view(stored, request.host(reader, stored))
    try:
        with path.open("wb") as file:
            file.writelines(perfetto.chunks(view, stored.finding.request.start_ns, stored.start_unix_ns))
    except OSError as exc:
        raise WhyspanError(f"cannot write {path}: {exc.strerror}") from exc


def _document(stored: Stored) -> dict[str, Any]:
    import msgspec

    from whyspan import clock

    finding = stored.finding
    request = {"start": clock.rfc3339(stored.start_unix_ns), **msgspec.to_builtins(finding.request)}
    return {
        "request": request,
        "wall_ns": finding.wall_ns,
        "accounted_ns": finding.accounted_ns,
        "segments": msgspec.to_builtins(finding.segments),
        "causes": finding.causes,
        "baseline": finding.baseline,
        "verdict": msgspec.to_builtins(finding.verdict),
        "ruled_out": msgspec.to_builtins(finding.ruled_out),
        "process": msgspec.to_builtins(finding.process),
        "phases": [
            {"name": p.name, "start_ns": p.start_ns, "end_ns": p.end_ns, "ms": (p.end_ns - p.start_ns) / 1e6}
            for p in finding.phases
        ],
        "engine": msgspec.to_builtins(finding.engine),
        "stacks": msgspec.to_builtins(finding.stacks),
        "snapshots": msgspec.to_builtins(finding.snapshots),
    }


def report(stored: Stored, block: str = "█") -> list[str]:
    """Return what is known of a request, for people. *block* is what bars are made of."""
    from whyspan import clock, phases
    from whyspan.cli import _engine, _snapshot, _timeline
    from whyspan.model import FAILED
    from whyspan.text import clean
    from whyspan.views import request

    f = stored.finding
    r, v = f.request, f.verdict
    failed = r.outcome in FAILED
    out = [
        f"{clean(r.method, 10)} {clean(r.route, 100)}  {_status(stored)}"
        f"  service {clean(r.service, 40)}  {clock.rfc3339(stored.start_unix_ns)}",
        f"trace {clean(r.trace_id, 32)} ({clean(r.trace_id_source, 20)})"
        + (f"  request id {clean(r.request_id, 64)}" if r.request_id else ""),
        _times(stored),
        *_process(stored),
        *(
            _engine.lines(f.engine)
            if f.engine is not None and (f.engine.core_tgid or not f.engine.server_span_id)
            else ()
        ),
        "",
    ]
    if f.slow or failed:
        where = phases.of_cause(f)
        out.append(clean(v.sentence or f"The cause is {v.cause}.", 600))
        facts = [f"cause {clean(v.cause, 40)}", f"excess {v.excess_ms:.1f} ms ({v.share:.0%} of all excess)"]
        facts += [f"confidence {v.confidence:.2f}"] + ([f"phase {clean(where, 20)}"] if where else [])
        out.append("  " + ", ".join(facts))
        if v.culprit.kind or v.culprit.name:
            out.append(f"  culprit   {_engine.culprit(v.culprit)}")
        out += [f"  evidence  {clean(line, 200)}" for line in v.evidence]
        for other in v.others:
            who = f": {_engine.culprit(other.culprit)}" if other.culprit.kind or other.culprit.name else ""
            out.append(f"  also      {clean(other.cause, 40)}, {other.excess_ms:.1f} ms of excess{who}")
        near, others = request.nearest(f)
        if not near:
            near, others = others, []
        out += [f"  not       {clean(ruled.cause, 40)}: {clean(ruled.check, 160)}" for ruled in near]
        if others:
            out.append(
                f"  nor       {', '.join(clean(ruled.cause, 40) for ruled in others)} (--json says why)"
            )
        if v.fix:
            out.append(f"  fix       {clean(v.fix, 300)}")
    else:
        out.append("Not slow: sampled for the baseline.")
    if f.stacks:
        out += ["", *_code(f)]
    for snapshot in f.snapshots:
        out += ["", *_snapshot.lines(snapshot, r.start_ns)]
    if f.phases:
        out += ["", *_engine.phase_rows(f.phases, r.start_ns, f.wall_ns, block)]
    out += ["", *_causes(stored), "", f"{'at ms':>10} {'for ms':>10}"]
    out += _timeline.lines(f.segments, r.start_ns, f.wall_ns, block)
    return out


def _code(finding: Finding) -> list[str]:
    """Return where the verdict's cause spent its time, else whatever was seen most often."""
    from whyspan import codetext
    from whyspan.text import clean

    shown = codetext.of_cause(finding, finding.verdict.cause) or finding.stacks[0]
    lines = codetext.short(shown)
    who = f"{clean(shown.thread, 40) or 'thread'} [{shown.tid}]"
    alike, seen = codetext.counted(finding, shown)
    what = "long waits" if shown.blocked else "samples"
    out = [
        f"  code of {clean(shown.cause, 40)}: {who}, innermost in {seen} of {sum(s.samples for s in alike)} {what}:"
    ]
    out += [f"    {clean(line, 160)}" for line in lines[:_FRAMES]]
    return [*out, f"    ... ({len(lines) - _FRAMES} more)"] if len(lines) > _FRAMES else out


def _status(stored: Stored) -> str:
    """Return the status and, unless the answer was whole, how the request ended and by whose doing."""
    from whyspan.model import UNFINISHED
    from whyspan.text import clean

    r = stored.finding.request
    if r.outcome not in UNFINISHED:
        return str(r.status) if r.status else clean(r.outcome, 10)
    by = f" ({clean(r.ended_by, 20)})" if r.ended_by else ""
    return f"{r.status} " * bool(r.status) + clean(r.outcome, 10) + by


def _process(stored: Stored) -> list[str]:
    """Return the line that says where the request was served, when that was in a container."""
    from whyspan.containers import short
    from whyspan.text import clean

    p = stored.finding.process
    if p is None or not (p.container_id or p.pod_uid):
        return []
    parts = [f"container {short(clean(p.container_id, 64))}"] * bool(p.container_id)
    parts += [f"pod {clean(p.pod_uid, 64)}"] * bool(p.pod_uid)
    inside = f" ({p.vpid} inside)" if p.vpid else ""
    return [", ".join([*parts, f"process {clean(p.comm, 64)} {p.tgid}{inside}"])]


def _times(stored: Stored) -> str:
    f = stored.finding
    r = f.request
    parts = [f"{f.wall_ns / 1e6:.1f} ms"]
    if r.first_ns:
        parts.append(f"first byte after {(r.first_ns - r.start_ns) / 1e6:.1f} ms")
    parts.append(f"{r.chunks} chunks, {r.response_bytes} bytes")
    accounted = f.accounted_ns / f.wall_ns if f.wall_ns else 1.0
    parts.append(f"{accounted:.1%} accounted for")
    if f.lost_events:
        parts.append(f"{f.lost_events} events lost")
    return ", ".join(parts)


def _causes(stored: Stored) -> list[str]:
    """Return the table of time per cause beside the usual time, longest first."""
    from whyspan.text import clean

    f = stored.finding
    names = sorted(f.causes, key=lambda name: (-f.causes[name], name))
    usual = f"usual ms (of {f.baseline_count})" if f.baseline else "no baseline yet"
    rows = [f"  {'cause':<30} {'ms':>10}  {usual}"]
    for name in names[:_CAUSE_ROWS]:
        base = f"{f.baseline.get(name, 0.0):.2f}" if f.baseline else ""
        rows.append(f"  {clean(name, 30):<30} {f.causes[name]:>10.2f}  {base}".rstrip())
    if len(names) > _CAUSE_ROWS:
        rest = sum(f.causes[name] for name in names[_CAUSE_ROWS:])
        rows.append(f"  {f'({len(names) - _CAUSE_ROWS} others)':<30} {rest:>10.2f}")
    return rows
