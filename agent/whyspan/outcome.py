"""How a request failed, in the words of OpenTelemetry's conventions."""

from __future__ import annotations

from typing import Final

from whyspan.model import UNFINISHED, Request
from whyspan.text import clean

_CHARS: Final = 128
_ERROR_TYPES: Final = {"reset": "connection_reset", "killed": "process_exit"}


def error_type(request: Request) -> str:
    """Return ``error.type``: the status, or how the request was cut off; empty when that is no error of the server.

    As for server spans by the HTTP conventions, a status of 4xx is none; but 429 is, since the server refused work.
    """
    if request.outcome == "error":
        return str(request.status) if request.status >= 500 or request.status == 429 else ""
    if request.outcome in UNFINISHED:
        return clean(request.ended_by, _CHARS) or _ERROR_TYPES[request.outcome]
    return ""
