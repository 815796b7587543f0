"""``whyspan engines``: the inference engines seen, what they say of themselves, and how they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from whyspan.cli._options import console, open_reader, store_options
from whyspan.text import clean

_MAX_STAGES = 16


@click.command(name="engines")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, config_path: Path | None, store_path: Path | None, as_json: bool) -> None:
    """List the engines: processes, state of their marks, batches, KV cache, and how long each stage of the start took.

    Where a value is not known, there is a dash. Needs a running agent.
    """
    from whyspan.errors import StoreError

    with open_reader(config_path, store_path) as reader:
        status = reader.status()
    if not status:
        raise StoreError("the agent has not been heard of for 30 s; is `whyspan run` running?")
    found = status.get("engines")
    engines = [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []
    if as_json:
        click.echo(json.dumps(engines, indent=2))
    elif engines:
        _print(engines)
    else:
        click.echo(
            "no engine has spoken: install whyspan-inproc beside vLLM or transformers, or start the server so that it"
            " publishes /metrics or KV events (`whyspan probes` shows what is attached)"
        )


def _print(engines: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("process", "service", "engine", "role", "marks"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for title in ("steps", "run/wait", "batch", "step ms", "KV used", "prefix hits", "preempted"):
        table.add_column(title, justify="right", no_wrap=True)
    for e in engines:
        table.add_row(*_cells(e))
    out.print(table)
    for line in (line for e in engines for line in _notes(e)):
        out.print(line)


def _cells(e: dict[str, Any]) -> list[str]:
    rank = e.get("rank")
    role = f"{_text(e, 'role', 12) or '-'}{f' {rank}' if isinstance(rank, int) and rank else ''}"
    running, waiting = _number(e, "running", "{:.0f}"), _number(e, "waiting", "{:.0f}")
    return [
        _number(e, "tgid", "{:.0f}"),
        _text(e, "service", 24),
        f"{_text(e, 'engine', 16)} {_text(e, 'version', 16)}".strip() or "-",
        role,
        _text(e, "state", 12),
        _number(e, "steps", "{:,.0f}") if e.get("steps") else "-",
        "-" if running == waiting == "-" else f"{running}/{waiting}",
        _number(e, "batch", "{:.1f}"),
        _number(e, "step_ms", "{:.2f}"),
        _number(e, "kv_usage", "{:.0%}"),
        _number(e, "prefix_hit_ratio", "{:.0%}"),
        _number(e, "preemptions", "{:.0f}"),
    ]


def _notes(e: dict[str, Any]) -> list[str]:
    """What needs more than a cell: hooks that are missing, trouble, the stages of the start."""
    who = f"process {_number(e, 'tgid', '{:.0f}')}"
    out = []
    missing = [clean(str(name), 64) for name in _list(e, "missing")]
    if missing:
        out.append(f"{who}: hooks missing: {', '.join(missing)}")
    if _above(e, "frozen_s", 0):
        out.append(f"{who}: no step has ended for {e['frozen_s']:.0f} s although there is work")
    if _above(e, "zombies", 0):
        out.append(f"{who}: {e['zombies']} sequences at work for clients that have left")
    if _above(e, "fragmentation", 0.0):
        out.append(f"{who}: {e['fragmentation']:.0%} of the KV blocks given out is not filled by tokens")
    stages = [s for s in _list(e, "stages") if isinstance(s, dict)][:_MAX_STAGES]
    if stages:
        out.append(f"{who}: start: {', '.join(map(_stage, stages))}")
    return out


def _stage(s: dict[str, Any]) -> str:
    what = _text(s, "what", 40)
    named = _text(s, "name", 24) + (f" of {what}" if what else "")
    return f"{named} {_number(s, 'ms', '{:,.0f}')} ms" + (" (again)" if s.get("again") else "")


# What comes out of the store was written by another process: a value of another kind counts as not known.


def _text(e: dict[str, Any], key: str, limit: int) -> str:
    value = e.get(key)
    return clean(value, limit) if isinstance(value, str) else ""


def _number(e: dict[str, Any], key: str, form: str) -> str:
    value = e.get(key)
    show: Callable[[float], str] = form.format
    return show(value) if isinstance(value, (int, float)) else "-"


def _above(e: dict[str, Any], key: str, least: float) -> bool:
    value = e.get(key)
    return isinstance(value, (int, float)) and value > least


def _list(e: dict[str, Any], key: str) -> list[Any]:
    value = e.get(key)
    return value if isinstance(value, list) else []
