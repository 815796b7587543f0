"""What happened to a request that failed, in plain words: who ended it, and which processes died beside it."""

from __future__ import annotations

import signal
from typing import Final

from whyspan.facts import Death, Facts
from whyspan.latency import latency_ms
from whyspan.model import Request

#: A process that died so long before a request began may still be why it got no answer, or only an error.
DIED_BEFORE_NS: Final = 60_000_000_000
# A server that notices at once that its client left is not worth a word.
_NOTICED_MS: Final = 10.0
_LISTED: Final = 3
_SIGNAL_BITS: Final = 0x7F
_SERVER_ERROR: Final = 500
_MS: Final = 1_000_000

_ENDED: Final = {
    "client_close": "The client closed the connection",
    "client_reset": "The client reset the connection",
    "server_close": "The server closed the connection",
    "server_reset": "The server reset the connection",
    "engine_exit": "The engine's process ended",
    "timeout": "The client's side no longer answered and the connection timed out",
}


def ending(request: Request, facts: Facts) -> str:
    """Return how a failed request ended, as a sentence without its full stop."""
    if request.ended_by == "server":
        fault = {"cut": ", before its head was whole", "malformed": ", its head being malformed"}
        return f"Failed with {request.status} after {in_ms(latency_ms(request))}{fault.get(request.head, '')}"
    if request.ended_by == "process_exit":
        who = f"Process {request.tgid} ({facts.comm(request.tgid)})"
        return f"{who} {how(request.exit_code)} after {in_ms(latency_ms(request))}{_progress(request)}"
    what = _ENDED.get(request.ended_by, "The connection ended")
    if request.ended_by != "client_close" or request.left_ns < request.start_ns:
        return f"{what} after {in_ms(latency_ms(request))}{_progress(request)}"
    late = (request.end_ns - request.left_ns) / _MS
    text = f"{what} after {in_ms((request.left_ns - request.start_ns) / _MS)}{_progress(request)}"
    return text + (f"; the server took {in_ms(late)} to notice" if late >= _NOTICED_MS else "")


def how(exit_code: int) -> str:
    """Return how a process ended, from its wait status."""
    number = exit_code & _SIGNAL_BITS
    if not number:
        return f"ended with status {exit_code >> 8 & 0xFF}"
    try:
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"was killed by signal {number}"


def deaths(request: Request, facts: Facts) -> list[str]:
    """Return in words which other processes of the service died during the request, at most three.

    Also shortly before it, where it came to nothing. The one that says most comes first: during before earlier, by a
    signal before with an error.
    """
    if request.outcome == "error" and request.status < _SERVER_ERROR:
        return []  # the client's fault, or too many at a time
    in_vain = not request.status or request.status >= _SERVER_ERROR
    before_ns = DIED_BEFORE_NS if in_vain and request.ended_by != "process_exit" else 0
    found = [
        d
        for d in facts.deaths(request.service, request.start_ns - before_ns, request.end_ns)
        # A helper that the request itself started may well end with an error.
        if d.tgid != request.tgid and (d.exit_code & _SIGNAL_BITS or d.born_ns < request.start_ns)
    ]
    found.sort(
        key=lambda d: (
            d.ts_ns < request.start_ns,
            not d.exit_code & _SIGNAL_BITS,
            abs(d.ts_ns - request.start_ns),
            d.tgid,
        )
    )
    return [_died(d, request) for d in found[:_LISTED]]


def _died(death: Death, request: Request) -> str:
    who = f"process {death.tgid} ({death.name}) of the same service {how(death.exit_code)}"
    at = (death.ts_ns - request.start_ns) / _MS
    return f"{in_ms(at)} after its start {who}" if at >= 0 else f"{who} {in_ms(-at)} before its start"


def _progress(request: Request) -> str:
    if request.head == "unread":
        return ", before anybody had read the request"
    if request.head == "cut":
        return ", before the request's head was whole"
    if not request.head_ns:
        return ", before any answer"
    if not request.chunks:
        return ", before any byte of the answer's body"
    return f" and {request.chunks} chunk{'s' if request.chunks > 1 else ''}"


def in_ms(ms: float) -> str:
    """Return a time for a sentence."""
    return f"{ms:.0f} ms" if ms >= 1 or ms == 0 else f"{ms:.1f} ms"
