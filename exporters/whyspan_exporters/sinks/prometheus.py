"""Metrics for Prometheus to scrape. On only with ``[prometheus] listen``."""

from __future__ import annotations

from whyspan.config import Config

from whyspan_exporters.sinks import Sink


def depends(config: Config) -> object:
    """Return what `open` goes by."""
    return config.prometheus


def open(config: Config) -> Sink | None:
    """Return the sink that ``[prometheus]`` asks for, already bound; None when it is off."""
    address = config.prometheus.address
    if address is None:
        return None
    from whyspan_exporters.metrics.scraped import PrometheusSink

    return PrometheusSink(*address)
