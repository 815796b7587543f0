"""Options that several commands share, and how they read the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console
    from whyspan_exporters.bulk import BulkReader
    from whyspan_exporters.reader import Reader

F = TypeVar("F", bound=Callable[..., Any])

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


def store_of(config_path: Path | None, store_path: Path | None) -> Path:
    """Return the store that the options name.

    Raises:
        ConfigError: The configuration is wrong.
    """
    from whyspan.config import load_config

    return load_config(config_path).store_path if store_path is None else store_path


@contextlib.contextmanager
def open_reader(config_path: Path | None, store_path: Path | None) -> Iterator[Reader]:
    """Open the store that the options name.

    Raises:
        ConfigError: The configuration is wrong.
        StoreError: There is no store, or it cannot be read.
    """
    from whyspan_exporters.reader import Reader

    with contextlib.closing(Reader(store_of(config_path, store_path))) as reader:
        yield reader


@contextlib.contextmanager
def bulk_reader(config_path: Path | None, store_path: Path | None) -> Iterator[BulkReader]:
    """Open the store that the options name, for questions about very many requests.

    Raises:
        ConfigError: The configuration is wrong.
        StoreError: There is no store, or it cannot be read.
    """
    from whyspan_exporters.bulk import BulkReader

    with contextlib.closing(BulkReader(store_of(config_path, store_path))) as reader:
        yield reader


def console() -> Console:
    """Return a console that takes strings as they are: no markup, no emoji; wide when piped."""
    from rich.console import Console

    out = Console(markup=False, emoji=False, highlight=False, soft_wrap=False)
    if not out.is_terminal:
        out.width = _PIPE_WIDTH
    return out
