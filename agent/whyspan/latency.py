"""How long a request took, and how long it waited for its first byte."""

from __future__ import annotations

from typing import Final

from whyspan.model import UNFINISHED, Request

_MS: Final = 1e6


def latency_ms(request: Request) -> float:
    """Return the request's wall time."""
    return max(request.end_ns - request.start_ns, 0) / _MS


def waited_in_vain(request: Request) -> bool:
    """Return whether the request came to nothing without a byte of an answer."""
    return request.outcome in UNFINISHED and not (request.first_ns or request.head_ns)


def ttft_ms(request: Request) -> float:
    """Return the time to its first byte out, or that it waited for none; -1 when there was none and it is open."""
    if waited_in_vain(request):
        return latency_ms(request)
    first = request.first_ns or request.head_ns
    return (first - request.start_ns) / _MS if first >= request.start_ns and first else -1.0
