"""The local store: always on."""

from __future__ import annotations

from whyspan.config import Config

from whyspan_exporters.store import Store


def depends(config: Config) -> object:
    """Return what `open` goes by."""
    return config.store


def open(config: Config) -> Store:
    """Open the SQLite store for writing; see `Store` for what it raises."""
    return Store(
        config.store_path,
        max_age_ns=int(config.store.max_age_h * 3_600_000_000_000),
        max_bytes=config.store.max_mb << 20,
    )
