"""OTLP over HTTP as protobuf, by requests: proxies, TLS and keep-alive are its business."""

from __future__ import annotations

import gzip
import zlib
from typing import Any, Final

import requests
import urllib3
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from whyspan import __version__

from whyspan_exporters.otlp.settings import Target
from whyspan_exporters.otlp.transport import Answer, Kind, provided_credentials

_RESPONSES: Final[dict[str, tuple[Any, str]]] = {
    "traces": (trace_service_pb2.ExportTraceServiceResponse, "rejected_spans"),
    "metrics": (metrics_service_pb2.ExportMetricsServiceResponse, "rejected_data_points"),
}
#: The specification's list; every other status of 400 and more must not be tried again.
_RETRYABLE: Final = frozenset({429, 502, 503, 504})
_SMALLER: Final = frozenset({400, 413})
_COMPRESS: Final[dict[str, Any]] = {"gzip": gzip.compress, "deflate": zlib.compress}
#: Of an answer; a longer one is cut off there, whatever the receiver sends.
_MAX_ANSWER_BYTES: Final = 64 << 10


class HttpTransport:
    """One session; it keeps its connection."""

    def __init__(self, target: Target) -> None:
        """Make the session; it connects at the first `send`."""
        self._target = target
        self._response, self._rejected = _RESPONSES[target.signal]
        self._session: requests.Session = provided_credentials("HTTP", target.signal) or requests.Session()
        self._headers = {
            "User-Agent": f"whyspan/{__version__}",
            **target.headers,
            "Content-Type": "application/x-protobuf",
        }
        self._compress = _COMPRESS.get(target.compression)
        if self._compress is not None:
            self._headers["Content-Encoding"] = target.compression
        # Given with each request: a session's own would lose against REQUESTS_CA_BUNDLE.
        self._tls: dict[str, Any] = {}
        if target.certificate:
            self._tls["verify"] = target.certificate
        if target.client_certificate:
            self._tls["cert"] = (target.client_certificate, target.client_key)

    def send(self, payload: bytes) -> Answer:
        """See `Transport`."""
        body = self._compress(payload) if self._compress is not None else payload
        try:
            # Not redirected: what follows one is a GET, which would count as success.
            response = self._session.post(
                self._target.endpoint,
                data=body,
                headers=self._headers,
                timeout=self._target.timeout_s,
                allow_redirects=False,
                stream=True,
                **self._tls,
            )
        except requests.RequestException as exc:
            return Answer(Kind.LATER, _innermost(exc))
        with response:
            return self._answer(response, _read(response))

    def close(self) -> None:
        """See `Transport`. A request on its way is not cut short."""
        self._session.close()

    def _answer(self, response: requests.Response, body: bytes) -> Answer:
        status = response.status_code
        if 200 <= status < 300:
            try:
                partial = self._response.FromString(body).partial_success
            except DecodeError:
                return Answer(Kind.TAKEN)  # some answer in JSON, or with a page
            return Answer(Kind.TAKEN, partial.error_message, getattr(partial, self._rejected))
        if status < 400:
            # The operator's to mend, and nothing is lost meanwhile.
            return Answer(Kind.LATER, f"redirected ({status}): give the final address")
        reason = f"HTTP status {status} {response.reason}{_said(response, body)}"
        if status in _RETRYABLE:
            return Answer(Kind.LATER, reason, after_s=_retry_after_s(response))
        return Answer(Kind.REFUSED, reason, smaller=status in _SMALLER)


def make(target: Target) -> HttpTransport:
    """Return a transport for *target*."""
    return HttpTransport(target)


def _read(response: requests.Response) -> bytes:
    try:
        body: bytes = response.raw.read(_MAX_ANSWER_BYTES, decode_content=True)
    except (urllib3.exceptions.HTTPError, OSError):
        return b""  # the status has been told
    return body


def _said(response: requests.Response, body: bytes) -> str:
    if response.headers.get("Content-Type") != "application/x-protobuf":
        return ""
    try:
        message: str = status_pb2.Status.FromString(body).message
    except DecodeError:
        return ""
    return f": {message}" if message else ""


def _retry_after_s(response: requests.Response) -> float:
    text = response.headers.get("Retry-After")
    try:
        return urllib3.Retry().parse_retry_after(text) if text else 0.0
    except (urllib3.exceptions.InvalidHeader, OverflowError, ValueError):
        return 0.0


def _innermost(exc: BaseException) -> str:
    """What went wrong at the bottom: the layers above repeat it in three lines of brackets."""
    for _ in range(8):
        inner = getattr(exc, "reason", None) or next(iter(exc.args), None)
        if not isinstance(inner, BaseException):
            break
        exc = inner
    return str(exc) or type(exc).__name__
