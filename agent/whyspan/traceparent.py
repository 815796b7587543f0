"""W3C trace context, level 1: the ``traceparent`` header."""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(NamedTuple):
    """The caller's ids in lower-case hex, and whether it samples the trace."""

    trace_id: str
    span_id: str
    sampled: bool


def parse(text: str) -> TraceParent | None:
    """Return the header's content, or None when it is malformed.

    Follows https://www.w3.org/TR/trace-context/#traceparent-header: version ff and ids of zeros are invalid;
    version 00 has nothing after the flags, later versions may.
    """
    m = _FORM.fullmatch(text.strip(" \t"))
    if m is None or m[1] == "ff" or (m[1] == "00" and m[5]):
        return None
    if not int(m[2], 16) or not int(m[3], 16):
        return None
    return TraceParent(m[2], m[3], bool(int(m[4], 16) & 1))
