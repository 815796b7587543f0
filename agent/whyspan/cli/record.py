"""``whyspan record``: raw events to a file, for replay elsewhere and for regression tests."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whyspan.cli._options import btf_option, config_option, console
from whyspan.errors import ConfigError, WhyspanError
from whyspan.text import clean

if TYPE_CHECKING:
    from whyspan_probes.state import ProbeState


@click.command(name="record")
@config_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write.",
)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="How long.")
@click.option(
    "--pid", "pids", type=click.IntRange(min=1), multiple=True, help="Watch this process (repeatable)."
)
@click.option("--max-mb", type=click.IntRange(1), default=1024, show_default=True, help="Stop at this size.")
@btf_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    config_path: Path | None,
    output: Path,
    seconds: float,
    pids: tuple[int, ...],
    max_mb: int,
    btf: Path | None,
    as_json: bool,
) -> None:
    """Record the events of the watched processes until the time is up or Ctrl-C.

    Request heads are stored parsed: no query, cookie, authorisation or body is in the file.
    """
    from whyspan_probes.errors import ProbeFrameworkError
    from whyspan_probes.registry import discover

    from whyspan.baseline import Baseline
    from whyspan.config import load_config
    from whyspan.discovery import Discovery
    from whyspan.pipeline.collector import header_of
    from whyspan.pipeline.settings import kernel_btf
    from whyspan.pipeline.source import LiveSource
    from whyspan.recording import Writer

    overrides: dict[str, Any] = {}
    if pids:
        overrides["targets"] = {"match": [{"pid": p} for p in pids], "auto": False}
    if btf:
        overrides["collector"] = {"btf": str(btf)}
    config = load_config(config_path, overrides)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        source = LiveSource(
            discover(),
            Discovery(config.targets),
            ring_bytes=config.collector.ring_bytes,
            header_allow=config.collector.header_allow,
            disabled=config.collector.disable_probes,
            kernel=kernel_btf(config.collector.btf),
            progress=_tell,
        )
    except (ProbeFrameworkError, PermissionError) as e:
        raise WhyspanError(f"cannot attach: {e}") from e
    try:
        if not source.discovery.found:
            raise ConfigError("nothing to record: no inference server found, and no --pid names one")
        try:
            writer = Writer(output, header_of(config, f"{time.time_ns():x}", Baseline()), source.schema)
        except OSError as e:
            raise WhyspanError(f"cannot write {output}: {e.strerror}") from e
        events = lost = heads = 0
        end_s = time.monotonic() + seconds
        status = console().status("recording") if not as_json else None
        try:
            if status:
                status.start()
            done = False
            while not done:
                # Stopped or not, what has arrived is taken.
                done = stop.wait(min(0.25, max(0.0, end_s - time.monotonic())))
                batch = source.drain()
                writer.add(batch)
                events += len(batch.events)
                heads += len(batch.heads)
                lost += sum(batch.lost.values())
                if status:
                    left = max(0.0, end_s - time.monotonic())
                    status.update(f"{events:,} events, {heads:,} requests, {left:.0f} s left")
                done = done or time.monotonic() >= end_s or writer.bytes >= max_mb << 20
        except OSError as e:
            raise WhyspanError(f"{output}: {e.strerror}; what was written stays readable") from e
        finally:
            if status:
                status.stop()
            writer.close()
    finally:
        source.close()
    summary = {"file": str(output), "events": events, "requests": heads, "lost": lost, "bytes": writer.bytes}
    click.echo(
        json.dumps(summary, indent=2)
        if as_json
        else f"{output}: {events:,} events, {heads:,} requests, {lost:,} lost, {writer.bytes / 1e6:.1f} MB"
    )


def _tell(state: ProbeState) -> None:
    """Say of a probe what will be missing from the recording."""
    if state.state in ("failed", "partial"):
        click.echo(f"whyspan: probe {state.name}: {state.state}: {clean(state.reason, 500)}", err=True)
