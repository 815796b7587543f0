"""Answers in JSON: what a struct says, or what is wrong in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from whyspan.text import clean

JSON: Final = "application/json"
_LONGEST: Final = 400


class Problem(msgspec.Struct):
    """What is wrong, in one line."""

    error: str


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return *body*, a struct, as JSON."""
    return Response(encode(body), status, headers, media_type=JSON)


def encode(body: Any) -> bytes:
    """Return *body* as JSON."""
    return msgspec.json.encode(body)


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error."""
    return answer(Problem(clean(text, _LONGEST)), status, headers)
