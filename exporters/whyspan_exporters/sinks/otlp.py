"""Findings as spans, and whyspan's own metrics, to an OpenTelemetry collector. On only with an endpoint."""

from __future__ import annotations

import logging
import os

from whyspan.config import Config

from whyspan_exporters.otlp.settings import Settings, resolve
from whyspan_exporters.sinks import Sink

log = logging.getLogger("whyspan.otlp")


def depends(config: Config) -> object:
    """Return what `open` goes by: a certificate that was renewed counts as changed."""
    o = config.otlp
    return o, [_changed_ns(path) for path in (o.certificate, o.client_certificate, o.client_key) if path]


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def open(config: Config) -> Sink | None:
    """Return the sink that ``[otlp]`` and the environment ask for; None when they name no endpoint.

    Raises:
        ConfigError: ``[otlp]`` is wrong.
    """
    settings = resolve(config.otlp, os.environ)
    if settings.problem:
        log.error("otlp: %s", settings.problem)
    if settings == Settings(None, None, settings.interval_s):
        return None
    # The SDK is 20 MB: not loaded by those who do not send.
    from whyspan_exporters.otlp.sink import OtlpSink

    return OtlpSink(settings, config.otlp, config.spool_path)
