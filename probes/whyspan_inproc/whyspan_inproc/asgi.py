"""The HTTP request in progress in a Starlette or FastAPI server: whose it is, and by which connection it came."""

from __future__ import annotations

import os
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from whyspan_inproc.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: Version, trace id, parent span id, flags: https://www.w3.org/TR/trace-context/#traceparent-header-field-values
_TRACEPARENT = re.compile(r"^(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-|$)")
_MAX_ID = 128
_NOT_PLAIN = re.compile(r"[^\x21-\x7e]+")
#: Tags of prompt templates that may be told, by comma; a request names its own in this header.
TEMPLATES = "WHYSPAN_PROMPT_TEMPLATES"
_TEMPLATE_HEADER = b"x-prompt-template"


class Incoming(NamedTuple):
    """The request in progress; ids are empty where the caller sent none."""

    trace_id: str = ""
    span_id: str = ""
    request_id: str = ""
    client_port: int = 0
    server_port: int = 0
    template: str = ""


current: ContextVar[Incoming] = ContextVar("whyspan_request", default=Incoming())  # noqa: B039 (immutable)


def traceparent(value: str) -> tuple[str, str]:
    """Return trace id and span id of a ``traceparent`` header; empty strings if it is not valid."""
    match = _TRACEPARENT.match(value.strip())
    if not match or not match.group(1).strip("0") or not match.group(2).strip("0"):
        return "", ""
    return match.group(1), match.group(2)


def read(scope: Mapping[str, Any]) -> Incoming:
    """Return what an ASGI scope says of its request."""
    trace_id = span_id = request_id = template = ""
    headers: Iterable[tuple[bytes, bytes]] = scope.get("headers") or ()
    for name, value in headers:
        if name == b"traceparent":
            trace_id, span_id = traceparent(value.decode("latin-1"))
        elif name == b"x-request-id":
            request_id = _NOT_PLAIN.sub("", value.decode("latin-1"))[:_MAX_ID]
        elif name == _TEMPLATE_HEADER:
            tag = value.decode("latin-1")
            template = tag if tag in os.environ.get(TEMPLATES, "").split(",") else ""
    ports = _port(scope.get("client")), _port(scope.get("server"))
    return Incoming(trace_id, span_id, request_id, *ports, template[:_MAX_ID])


def _port(address: Sequence[Any] | None) -> int:
    """Return the port of an ASGI address; 0 of a unix socket, whose second item is None."""
    return int(address[1] or 0) if address and len(address) > 1 else 0


def _before(_hook: Hook, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    scope = args[1]
    if scope["type"] in ("http", "websocket"):
        current.set(read(scope))  # never reset: the context is the request's task's own


_HOOK = Hook(
    "frontend", "starlette.applications", "Starlette.__call__", "self scope", before=_before, coroutine=True
)
_registered = False


def register() -> None:
    """Remember each request of a Starlette application in ``current``, once Starlette is imported."""
    global _registered
    if not _registered:
        _registered = True
        _HOOK.wait()
