"""Makes the OpenTelemetry SDK's exporters. gRPC is imported only here, and only for a target that speaks it."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace.export import SpanExporter

from whyspan_exporters.otlp.settings import GRPC, Target

Note = Callable[[str], None]

_PACKAGES: Final = {"traces": "trace_exporter", "metrics": "metric_exporter"}
# Names an entry point that makes the SDK's HTTP session, with credentials of its own.
_OWN_SESSION: Final = re.compile("OTEL_PYTHON_EXPORTER_OTLP_HTTP_(\\w+_)?CREDENTIAL_PROVIDER")


def load(target: Target) -> None:
    """Import what *target* needs; opens nothing and starts no thread."""
    importlib.import_module(_module(target))
    if target.protocol != GRPC:
        with contextlib.suppress(ImportError):  # today's HTTP client of the SDK, which it imports late
            importlib.import_module("requests")


def span_exporter(target: Target, note: Note) -> SpanExporter:
    """Return the SDK's exporter of spans for *target*; it tells *note* what went wrong, as far as it can.

    Raises whatever the SDK raises for an environment that it cannot use, such as an unknown compression.
    """
    options = _options(target, note)
    exporter: SpanExporter = importlib.import_module(_module(target)).OTLPSpanExporter(**options)
    return exporter


def metric_exporter(target: Target, note: Note, on_result: Callable[[bool], None]) -> MetricExporter:
    """Return the SDK's exporter of metrics for *target*; it tells *on_result* of every export.

    Raises as `span_exporter` does.
    """
    base: Any = importlib.import_module(_module(target)).OTLPMetricExporter

    class Reporting(base):  # type: ignore[misc]  # the base is known at run time only
        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
        ) -> MetricExportResult:
            try:
                result: MetricExportResult = super().export(metrics_data, timeout_millis, **kwargs)
            except Exception:
                on_result(False)
                raise
            on_result(result is MetricExportResult.SUCCESS)
            return result

    exporter: MetricExporter = Reporting(**_options(target, note))
    return exporter


def _module(target: Target) -> str:
    protocol = "grpc" if target.protocol == GRPC else "http"
    # The core writes every failed handshake to standard error; the state says it once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return f"opentelemetry.exporter.otlp.proto.{protocol}.{_PACKAGES[target.signal]}"


def _options(target: Target, note: Note) -> dict[str, Any]:
    return _grpc_options(target) if target.protocol == GRPC else _http_options(target, note)


def _grpc_options(target: Target) -> dict[str, Any]:
    import grpc

    compressions = {"gzip": grpc.Compression.Gzip, "none": grpc.Compression.NoCompression}
    options: dict[str, Any] = {
        "endpoint": target.endpoint,
        "timeout": target.timeout_s,
        "headers": tuple(target.headers.items()) if target.headers else None,
        "compression": compressions[target.compression] if target.compression else None,
    }
    if target.certificate:
        options["credentials"] = grpc.ssl_channel_credentials(Path(target.certificate).read_bytes())
    return options


def _http_options(target: Target, note: Note) -> dict[str, Any]:
    from opentelemetry.exporter.otlp.proto.http import Compression

    own_session = any(_OWN_SESSION.fullmatch(name) and value for name, value in os.environ.items())
    return {
        "session": None if own_session else _session(note),
        "endpoint": target.endpoint,
        "timeout": target.timeout_s,
        "headers": target.headers,
        "compression": Compression(target.compression) if target.compression else None,
        "certificate_file": target.certificate,
    }


def _session(note: Note) -> Any:
    requests: Any = importlib.import_module("requests")

    class Session(requests.Session):  # type: ignore[misc]  # known at run time only
        """Makes up for what the exporter does not tell, or gets wrong."""

        def request(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.verify, str):
                # Else REQUESTS_CA_BUNDLE would beat the certificate that was asked for.
                kwargs["verify"] = self.verify
            try:
                response = super().request(*args, **kwargs)
            except Exception as exc:
                note(_innermost(exc))
                raise
            if 300 <= response.status_code < 400:
                # It would count as success, and the spans would be gone.
                note(f"redirected ({response.status_code}): give the final address")
                raise requests.exceptions.InvalidURL("redirected")
            if response.status_code >= 400:
                note(f"HTTP status {response.status_code} {response.reason}")
            return response

    return Session()


def _innermost(exc: BaseException) -> str:
    """What went wrong at the bottom: the layers above repeat it in three lines of brackets."""
    for _ in range(8):
        inner = getattr(exc, "reason", None) or next(iter(exc.args), None)
        if not isinstance(inner, BaseException):
            break
        exc = inner
    return str(exc)
