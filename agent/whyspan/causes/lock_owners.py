"""Whose a mutex is, by the file whose code waits for it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

ALLOCATOR: Final = "allocator"
METRICS: Final = "metrics"
LIBRARY: Final = "library"

_PACKAGE: Final = re.compile(r"/(?:site|dist)-packages/([^/]+)")
#: Allocators that bring their own locks, also bundled into a wheel.
_ALLOCATORS: Final = re.compile(r"/lib(?:jemalloc|tcmalloc|mimalloc|hoard)[^/]*\.so")
_METRICS: Final = re.compile(r"/lib(?:prometheus|opentelemetry|otel|statsd|dogstatsd|opencensus)[^/]*\.so")
_METRICS_PACKAGES: Final = ("prometheus", "opentelemetry", "statsd", "datadog", "ddtrace", "opencensus")
#: Libraries of inference servers, where they are not in a Python package.
_LIBRARIES: Final = re.compile(
    r"/lib(?:torch|c10|onnxruntime|nvinfer|tritonserver|tensorrt|llama|ggml|mtmd|openblas|mkl_|zmq|grpc|arrow|uv"
    r"|cudart|cuda|nccl|cublas|mlx|openvino|tokenizers)[^/]*\.so"
)


def package(path: str) -> str:
    """Return the Python package that a file belongs to; empty when it is in none."""
    found = _PACKAGE.search(path)
    return found[1].split(".")[0] if found else ""


@lru_cache(maxsize=1024)
def owner(path: str) -> str:
    """Return what kind of library a file is: one of the above, or empty."""
    if _ALLOCATORS.search(path):
        return ALLOCATOR
    name = package(path)
    if _METRICS.search(path) or name.startswith(_METRICS_PACKAGES):
        return METRICS
    return LIBRARY if name or _LIBRARIES.search(path) else ""
