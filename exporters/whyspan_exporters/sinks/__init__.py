"""Where findings go. A sink is one module here; no list to edit.

It has ``open(config) -> Sink | None``, and ``depends(config)``: everything that ``open`` goes by. While that stays
equal, a reload leaves the sink alone.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

from whyspan.config import Config
from whyspan.errors import WhyspanError

from whyspan_exporters.records import Record

log = logging.getLogger("whyspan.exporter")


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
    for name, module in _modules():
        sink = module.open(config)
        if sink is not None:
            sinks[name] = sink
    return sinks


def reopen_sinks(sinks: dict[str, Sink], old: Config, new: Config, before: dict[str, object]) -> list[str]:
    """Close and open, in *sinks*, those for which *new* or their files differ. Returns their names.

    One that cannot be opened as *new* says is opened as *old* says, with an error in the log.

    Args:
        sinks: The open ones by name; changed in place.
        old: The configuration they were opened with.
        new: The one to go by.
        before: What `dependencies` returned when they were opened.

    Raises:
        WhyspanError: One cannot be opened again either way.
    """
    after = dependencies(new)
    changed = [name for name in after if after[name] != before.get(name)]
    for name, module in _modules():
        if name not in changed:
            continue
        if name in sinks:
            sinks.pop(name).close()
        try:
            sink = module.open(new)
        except WhyspanError as e:
            log.error("not reloaded, %s stays as it was: %s", name, e)
            sink = module.open(old)
        if sink is not None:
            sinks[name] = sink
    return changed


def dependencies(config: Config) -> dict[str, object]:
    """Return what each sink goes by, by name; values can be compared."""
    return {name: module.depends(config) for name, module in _modules()}


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        yield module.name, importlib.import_module(f"{__name__}.{module.name}")
