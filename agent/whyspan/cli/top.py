"""``whyspan top``: services, the tail by cause and the newest slow requests, live in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whyspan.cli._options import store_of, store_options
from whyspan.errors import ConfigError
from whyspan.times import duration_ns

if TYPE_CHECKING:
    from whyspan_exporters.reader import Stored


@click.command(name="top")
@store_options
@click.option(
    "--since",
    default="10m",
    show_default=True,
    metavar="AGE",
    help="How far back services and causes go; rounded up to 1m, 10m, 1h or 1d.",
)
def command(*, config_path: Path | None, store_path: Path | None, since: str) -> None:
    """Watch services, the tail by cause and the newest slow requests. Enter opens one, q quits.

    It reads the store only, and needs no privilege beyond that: over ssh, 80 columns and 24 lines will do.
    """
    from whyspan_exporters.reader import Reader

    from whyspan import clock
    from whyspan.top.app import Top
    from whyspan.top.source import Source

    window_s = duration_ns(since) // 1_000_000_000
    path = store_of(config_path, store_path)
    Reader(path).close()  # a store that is not there is said before the terminal is taken
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top needs a terminal; `whyspan slow` prints the newest slow requests")
    Top(Source(lambda: Reader(path), clock.now_unix_ns), report, window_s).run()


def report(stored: Stored) -> str:
    """Return what ``whyspan explain`` prints."""
    from whyspan.cli import explain

    return "\n".join(explain.report(stored))
