"""``whyspan probes``: what each probe is attached to, what it sees and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from whyspan.cli._options import console, open_reader, store_options
from whyspan.text import clean


@click.command(name="probes")
@store_options
@click.option("--fields", is_flag=True, help="Also list every event and field with its meaning.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, config_path: Path | None, store_path: Path | None, fields: bool, as_json: bool) -> None:
    """List the probes: state, hook used, hits per second, ns per hit, share of a core, drops; and what is sent."""
    from whyspan.errors import StoreError

    status, exporter = {}, {}
    try:
        with open_reader(config_path, store_path) as reader:
            status, exporter = reader.status(), reader.exporter_status()
    except StoreError:
        pass
    rows = _rows(status)
    sinks = exporter.get("sinks", {})
    if as_json:
        otlp = {"enabled": "otlp" in sinks, **sinks.get("otlp", {})}
        report = {"status": status, "exporter": exporter, "otlp": otlp, "probes": rows}
        click.echo(json.dumps(report, indent=2))
        return
    _print(rows, status, fields)
    if exporter:
        lines = [_prometheus_line(sinks.get("prometheus")), *_otlp_lines(sinks.get("otlp"))]
        console().print("\n" + "\n".join(lines))


def _rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The declared probes, with what the running agent last said of them."""
    from whyspan_probes.registry import discover

    running = {p["name"]: p for p in status.get("probes", ()) if isinstance(p, dict) and "name" in p}
    rows = []
    for found in discover():
        p = found.probe
        state = running.get(p.name, {})
        hooks = state.get("hooks", {})
        rows.append(
            {
                "name": p.name,
                "title": p.title,
                "cost": p.cost.value,
                "needs": p.needs,
                "joins": p.joins,
                "state": state.get("state", "not running"),
                "reason": state.get("reason", ""),
                "hooks": hooks or {name: {"used": [], "refused": []} for name in p.hook_names()},
                "files": state.get("files", []),
                "hits_per_s": state.get("hits_per_s", 0.0),
                "ns_per_hit": state.get("ns_per_hit", 0.0),
                "core_ratio": state.get("core_ratio", 0.0),
                "drops": state.get("drops", 0),
                "events": {name: dict(fields) for name, fields in p.events.items()},
                "config": dict(p.config),
            }
        )
    return rows


def _print(rows: list[dict[str, Any]], status: dict[str, Any], fields: bool) -> None:
    from rich.table import Table

    out = console()
    table = Table("probe", "state", "attached by", box=None, pad_edge=False)
    for name in ("hits/s", "ns/hit", "% of a core", "drops"):
        table.add_column(name, justify="right")
    for r in rows:
        used = dict.fromkeys(s for h in r["hooks"].values() for s in h["used"])
        measured = r["hits_per_s"] > 0
        table.add_row(
            r["name"],
            clean(f"{r['state']}: {r['reason']}" if r["reason"] else r["state"], 120),
            "\n".join(used),
            f"{r['hits_per_s']:,.0f}" if measured else "-",
            f"{r['ns_per_hit']:,.0f}" if measured else "-",
            f"{100 * r['core_ratio']:.3f}" if measured else "-",
            f"{r['drops']:,}",
        )
    out.print(table)
    files = [(r["name"], f) for r in rows for f in r["files"]]
    if files:
        table = Table("probe", "hook", "file", "state", "processes", box=None, pad_edge=False)
        for name, f in files:
            state = f"{f['state']}: {f['reason']}" if f["reason"] else f"{f['state']} by {f['by']}"
            tgids = ", ".join(map(str, f["processes"]))
            table.add_row(name, f["hook"], clean(f["path"], 120), clean(state, 120), tgids)
        out.print()
        out.print(table)
    if status:
        out.print(
            f"\nprobes {status.get('bpf_core_ratio', 0.0):.2%} and collector {status.get('agent_core_ratio', 0.0):.2%} "
            f"of a core; watched processes use {status.get('target_cores', 0.0):.2f} cores; "
            f"{status.get('events', 0):,} events since the start"
        )
    if fields:
        for r in rows:
            out.print(f"\n{r['name']}: {r['title']}\n  joins: {r['joins']}\n  needs: {r['needs']}")
            for event, payload in r["events"].items():
                out.print(f"  {event}")
                for name, meaning in payload.items():
                    out.print(f"    {name:<16} {meaning}")


def _otlp_lines(otlp: dict[str, Any] | None) -> list[str]:
    """What is sent where by OTLP, and the last error, in one line each."""
    from whyspan.clock import rfc3339

    if otlp is None:
        return ["otlp: off; set otlp.endpoint or OTEL_EXPORTER_OTLP_ENDPOINT to send spans and metrics"]
    lines = [f"otlp: {otlp['problem']}"] if otlp.get("problem") else []
    for signal, item in (("traces", "spans"), ("metrics", "data points")):
        s = otlp.get(signal)
        if not isinstance(s, dict):
            lines.append(f"otlp {signal}: off")
            continue
        line = (
            f"otlp {signal}: {s.get('protocol')} to {s.get('endpoint')}; {s.get('sent', 0):,} {item} sent, "
            f"{s.get('failed', 0):,} failed, {s.get('dropped', 0):,} dropped"
        )
        line += f", {s.get('queued', 0):,} queued; "
        if signal == "traces":
            line += f"{s.get('kept_local', 0):,} requests kept local"
        else:
            line += f"an export every {s.get('interval_s', 0):g} s"
        lines.append(line)
        if s.get("last_error"):
            since = "failing, last error" if s.get("failing") else "last error"
            lines.append(f"  {since} at {rfc3339(s.get('last_error_unix_ns', 0))}: {s['last_error']}")
    spool = otlp.get("spool")
    if isinstance(spool, dict):
        line = (
            f"otlp spool: {spool.get('batches', 0):,} batches, the oldest {spool.get('oldest_s', 0.0):.0f} s old; "
            f"{spool.get('bytes', 0) / 2**20:.1f} of {spool.get('max_bytes', 0) / 2**20:.0f} MiB on disk"
        )
        lines.append(f"{line}; {spool['state']}, what comes waits in memory" if spool.get("state") else line)
    return [clean(line, 600) for line in lines]


def _prometheus_line(state: dict[str, Any] | None) -> str:
    """Where metrics can be scraped, or why not."""
    if state is None:
        return "prometheus: off; set prometheus.listen to have metrics scraped"
    if state.get("problem"):
        return clean(f"prometheus: {state['problem']}", 600)
    answered, refused = state.get("answered", 0), state.get("refused", 0)
    return clean(
        f"prometheus: http://{state.get('listen')}/metrics; {answered:,} answered, {refused:,} refused", 600
    )
