"""Options that several commands share, and how they read the store."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from whyspan.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from whyspan_exporters.reader import Reader

F = TypeVar("F", bound=Callable[..., Any])

_UNITS_NS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_PIPE_WIDTH = 160

_PATH: click.Path = click.Path(dir_okay=False, path_type=Path)


def config_option(function: F) -> F:
    """Add ``--config FILE``, passed as ``config_path``."""
    return click.option("--config", "config_path", type=_PATH, help="Configuration file (TOML).")(function)


def btf_option(function: F) -> F:
    """Add ``--btf FILE``, passed as ``btf``, absolute."""

    def absolute(_ctx: click.Context, _option: click.Parameter, value: Path | None) -> Path | None:
        return None if value is None else value.absolute()

    text = "BTF of this kernel, where it has none of its own."
    return click.option("--btf", type=_PATH, metavar="FILE", callback=absolute, help=text)(function)


def store_options(function: F) -> F:
    """Add ``--config FILE`` and ``--store FILE``, passed as ``config_path`` and ``store_path``."""
    option = click.option(
        "--store", "store_path", type=_PATH, help="The store to read, instead of the configured one."
    )
    return config_option(option(function))


@contextlib.contextmanager
def open_reader(config_path: Path | None, store_path: Path | None) -> Iterator[Reader]:
    """Open the store that the options name.

    Raises:
        ConfigError: The configuration is wrong.
        StoreError: There is no store, or it cannot be read.
    """
    from whyspan_exporters.reader import Reader

    from whyspan.config import load_config

    reader = Reader(load_config(config_path).store_path if store_path is None else store_path)
    with contextlib.closing(reader):
        yield reader


def duration_ns(text: str) -> int:
    """Return ``90s``, ``10m``, ``2h`` or ``7d`` in ns.

    Raises:
        ConfigError: It is none of these.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration such as 90s, 10m, 2h or 7d")
    return int(float(match[1]) * _UNITS_NS[match[2]])


def console() -> Console:
    """Return a console that takes strings as they are: no markup, no emoji; wide when piped."""
    from rich.console import Console

    out = Console(markup=False, emoji=False, highlight=False, soft_wrap=False)
    if not out.is_terminal:
        out.width = _PIPE_WIDTH
    return out
