"""Where findings go. A sink is one module here with ``open(config) -> Sink | None``; no list to edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any, Protocol

from whyspan.config import Config

from whyspan_exporters.records import Record


class Sink(Protocol):
    """A destination. It bounds its own queue, counts what it drops, and never blocks for long."""

    def emit(self, records: Sequence[Record]) -> None:
        """Take *records*, in order. The same finding can come again (same id): that must change nothing."""

    def flush(self) -> str:
        """Make everything taken so far durable. Returns "" when it is, else why not (tried again later)."""

    def status(self) -> dict[str, Any]:
        """Return its state, JSON-like: what it counted, what went wrong. Shown by ``whyspan probes``."""

    def close(self) -> None:
        """Flush once more and release everything."""


def open_sinks(config: Config) -> dict[str, Sink]:
    """Return every sink that *config* enables, by module name.

    Raises:
        WhyspanError: A sink cannot be opened; the message says who should do what.
    """
    sinks: dict[str, Sink] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        sink = importlib.import_module(f"{__name__}.{module.name}").open(config)
        if sink is not None:
            sinks[module.name] = sink
    return sinks
