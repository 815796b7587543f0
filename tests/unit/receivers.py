"""Real OTLP receivers for tests: a gRPC server and an HTTP server that keep all they are sent.

``tls`` is a key file and a certificate file, and with a third one the authority of clients' certificates, which are
asked for then.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class Receiver:
    """What arrived, in order. ``refuse`` is what it answers instead of taking something, ``delay_s`` how slowly.

    ``retry_s`` goes with a refusal (``Retry-After`` as it stands, RetryInfo), ``partial`` with a success: how many
    items are rejected, and why. ``at_s`` is when each request came, refused or not.
    """

    def __init__(self, port: int = 0, tls: bool = False) -> None:
        self.port, self._scheme = port, "https" if tls else "http"
        self.traces: list[Any] = []
        self.metrics: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.refuse: Any = None
        self.refused = 0
        self.delay_s = 0.0
        self.retry_s: Any = None
        self.partial = (0, "")
        self.refuse_over = 1 << 60  # bytes of a request
        self.at_s: list[float] = []
        self.stopping = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def resource_spans(self) -> list[ResourceSpans]:
        return [r for request in list(self.traces) for r in request.resource_spans]

    def spans(self) -> list[Span]:
        return [span for r in self.resource_spans() for scope in r.scope_spans for span in scope.spans]

    def strings(self) -> list[str]:
        """Every text that arrived: names, attributes of resources, spans and events, labels of metrics."""
        out = [m.name for m in self.newest_metrics().values()]
        for r in self.resource_spans():
            out += _strings(values(r.resource.attributes))
        for span in self.spans():
            out += [span.name, span.status.message, *_strings(values(span.attributes))]
            for event in span.events:
                out += [event.name, *_strings(values(event.attributes))]
        for m in self.newest_metrics().values():
            for point in getattr(m, str(m.WhichOneof("data"))).data_points:
                out += _strings(values(point.attributes))
        return out

    def newest_metrics(self) -> dict[str, Metric]:
        """The metrics of the last export, by name."""
        last = self.metrics[-1:]
        return {
            m.name: m
            for request in last
            for r in request.resource_metrics
            for scope in r.scope_metrics
            for m in scope.metrics
        }

    def stop(self) -> None:
        raise NotImplementedError


class GrpcReceiver(Receiver):
    """The two services of OTLP over gRPC."""

    def __init__(self, port: int = 0, tls: tuple[Path, ...] | None = None) -> None:
        super().__init__(port, tls is not None)
        outer = self

        def take(request: Any, context: grpc.ServicerContext, kept: list[Any]) -> None:
            outer.headers.append({str(k): str(v) for k, v in context.invocation_metadata()})
            outer.at_s.append(time.monotonic())
            outer.stopping.wait(outer.delay_s)
            if outer.refuse is not None or request.ByteSize() > outer.refuse_over:
                outer.refused += 1
                if outer.retry_s is not None:
                    context.set_trailing_metadata((("grpc-status-details-bin", _retry_info(outer.retry_s)),))
                context.abort(outer.refuse or grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")
            kept.append(request)

        class Traces(trace_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                take(request, context, outer.traces)
                return _traces_answer(outer.partial)

        class Metrics(metrics_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                take(request, context, outer.metrics)
                return _metrics_answer(outer.partial)

        self._server = grpc.server(ThreadPoolExecutor(4))
        add: Any = trace_grpc.add_TraceServiceServicer_to_server
        add(Traces(), self._server)
        add = metrics_grpc.add_MetricsServiceServicer_to_server
        add(Metrics(), self._server)
        address = f"127.0.0.1:{port}"
        if tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            pair = (tls[0].read_bytes(), tls[1].read_bytes())
            authority = tls[2].read_bytes() if len(tls) > 2 else None
            credentials = grpc.ssl_server_credentials([pair], authority, authority is not None)
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()

    def stop(self) -> None:
        self.stopping.set()
        self._server.stop(0).wait()


class HttpReceiver(Receiver):
    """OTLP over HTTP, as protobuf, plain or gzip."""

    def __init__(self, port: int = 0, tls: tuple[Path, ...] | None = None) -> None:
        super().__init__(port, tls is not None)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.stopping.is_set():  # on a connection that was kept
                    self.close_connection = True
                    return
                outer.headers.append({k.lower(): v for k, v in self.headers.items()})
                outer.at_s.append(time.monotonic())
                outer.stopping.wait(outer.delay_s)
                if outer.refuse is not None or len(body) > outer.refuse_over:
                    outer.refused += 1
                    self._answer(outer.refuse or 413)
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.headers["Content-Type"] != "application/x-protobuf":
                    self._answer(415)
                elif self.path == "/v1/traces":
                    outer.traces.append(trace_pb2.ExportTraceServiceRequest.FromString(body))
                    self._answer(200, _traces_answer(outer.partial).SerializeToString())
                elif self.path == "/v1/metrics":
                    outer.metrics.append(metrics_pb2.ExportMetricsServiceRequest.FromString(body))
                    self._answer(200, _metrics_answer(outer.partial).SerializeToString())
                else:
                    self._answer(404)

            def _answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                if status >= 300 and outer.retry_s is not None:
                    self.send_header("Retry-After", str(outer.retry_s))
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certfile=tls[1], keyfile=tls[0])
            if len(tls) > 2:
                context.load_verify_locations(tls[2])
                context.verify_mode = ssl.CERT_REQUIRED
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Tap:
    """Passes a connection on to *port* and keeps what the client sent, as it was on the wire."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port: int) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=self._pump, args=(client, server, self.seen), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, bytearray()), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        # A thread in accept() would keep the socket; shutdown wakes it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _retry_info(delay_s: float) -> bytes:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(int(delay_s * 1e9))
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="not now")
    status.details.add().Pack(info)
    return bytes(status.SerializeToString())


def _traces_answer(partial: tuple[int, str]) -> Any:
    answer = trace_pb2.ExportTraceServiceResponse()
    if any(partial):
        answer.partial_success.rejected_spans, answer.partial_success.error_message = partial
    return answer


def _metrics_answer(partial: tuple[int, str]) -> Any:
    answer = metrics_pb2.ExportMetricsServiceResponse()
    if any(partial):
        answer.partial_success.rejected_data_points, answer.partial_success.error_message = partial
    return answer


def values(attributes: Any) -> dict[str, Any]:
    """Protobuf attributes as a dictionary."""
    return {a.key: _value(a.value) for a in attributes}


def _strings(found: dict[str, Any]) -> list[str]:
    # A name can hold what came from outside too, such as a cause's.
    return [*found, *(str(part) for v in found.values() for part in (v if isinstance(v, list) else [v]))]


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, which) if which else None


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait until *condition* holds; fail when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


RECEIVERS: dict[str, type[GrpcReceiver] | type[HttpReceiver]] = {
    "grpc": GrpcReceiver,
    "http/protobuf": HttpReceiver,
}
