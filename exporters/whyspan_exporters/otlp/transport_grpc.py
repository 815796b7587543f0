"""OTLP over gRPC: bytes in, the service's response out; nothing is decoded and encoded once more on the way."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from whyspan import __version__

from whyspan_exporters.otlp.settings import Target
from whyspan_exporters.otlp.transport import Answer, Kind, provided_credentials

_SERVICES: Final[dict[str, tuple[Any, Any, str]]] = {
    "traces": (
        trace_service_pb2.DESCRIPTOR.services_by_name["TraceService"],
        trace_service_pb2.ExportTraceServiceResponse,
        "rejected_spans",
    ),
    "metrics": (
        metrics_service_pb2.DESCRIPTOR.services_by_name["MetricsService"],
        metrics_service_pb2.ExportMetricsServiceResponse,
        "rejected_data_points",
    ),
}
_CODE: Final = grpc.StatusCode
#: The specification's table. RESOURCE_EXHAUSTED is one only when the receiver says when to come back.
_RETRYABLE: Final = frozenset(
    {
        _CODE.CANCELLED,
        _CODE.DEADLINE_EXCEEDED,
        _CODE.ABORTED,
        _CODE.OUT_OF_RANGE,
        _CODE.UNAVAILABLE,
        _CODE.DATA_LOSS,
    }
)
_SMALLER: Final = frozenset({_CODE.INVALID_ARGUMENT, _CODE.RESOURCE_EXHAUSTED})
_COMPRESSIONS: Final = {
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
    "none": grpc.Compression.NoCompression,
}
_OPTIONS: Final = (
    ("grpc.primary_user_agent", f"whyspan/{__version__}"),
    ("grpc.enable_retries", 0),  # the sender does that, and counts
    # The channel's own pause between connections would outgrow the sender's: 2 min by default.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcTransport:
    """One channel; it reconnects by itself."""

    def __init__(self, target: Target) -> None:
        """Make the channel; it connects at the first `send`. Raises `OSError` when a file cannot be read."""
        service, response, self._rejected = _SERVICES[target.signal]
        self._metadata = tuple(target.headers.items())
        self._timeout_s = target.timeout_s
        options: dict[str, Any] = {"options": _OPTIONS, "compression": _COMPRESSIONS[target.compression]}
        if target.insecure:
            self._channel = grpc.insecure_channel(target.authority, **options)
        else:
            self._channel = grpc.secure_channel(target.authority, _credentials(target), **options)
        self._export = self._channel.unary_unary(
            f"/{service.full_name}/Export",
            request_serializer=None,  # bytes already
            response_deserializer=response.FromString,
        )

    def send(self, payload: bytes) -> Answer:
        """See `Transport`."""
        try:
            response = self._export(payload, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            return _answer(error)
        partial = response.partial_success
        return Answer(Kind.TAKEN, partial.error_message, getattr(partial, self._rejected))

    def close(self) -> None:
        """See `Transport`."""
        self._channel.close()


def make(target: Target) -> GrpcTransport:
    """Return a transport for *target*."""
    return GrpcTransport(target)


def _credentials(target: Target) -> Any:
    provided = provided_credentials("GRPC", target.signal)
    if provided is not None:
        return provided

    def read(path: str) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return grpc.ssl_channel_credentials(
        read(target.certificate), read(target.client_key), read(target.client_certificate)
    )


def _answer(error: Any) -> Answer:
    code, after_s = error.code(), _retry_delay_s(error)
    reason = f"{code.name}: {error.details()}"
    if code in _RETRYABLE or (code is _CODE.RESOURCE_EXHAUSTED and after_s is not None):
        return Answer(Kind.LATER, reason, after_s=after_s or 0.0)
    return Answer(Kind.REFUSED, reason, smaller=code in _SMALLER)


def _retry_delay_s(error: Any) -> float | None:
    """The delay of the RetryInfo among the status's details; None without one."""
    for key, value in error.trailing_metadata() or ():
        info = error_details_pb2.RetryInfo()
        with contextlib.suppress(DecodeError):
            if key == "google.rpc.retryinfo-bin":  # some send it beside the status
                info.ParseFromString(value)
                return _seconds(info)
            if key == "grpc-status-details-bin":
                for detail in status_pb2.Status.FromString(value).details:
                    if detail.Unpack(info):
                        return _seconds(info)
    return None


def _seconds(info: Any) -> float:
    delay_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return max(0.0, delay_s)
