"""Ids of traces and spans, derived so that whoever needs one comes to the same."""

from __future__ import annotations

import hashlib
from typing import Final

_HEX: Final = frozenset("0123456789abcdefABCDEF")


def hex_id(text: str, size: int) -> int:
    """Return *text* as an id of *size* bytes; 0, which is no id, when it is none."""
    return int(text, 16) if len(text) == 2 * size and _HEX.issuperset(text) else 0


def derived(finding_id: str, role: str, size: int) -> int:
    """Return an id that is the same whenever the finding is sent, and not 0."""
    digest = hashlib.blake2b(f"{finding_id}/{role}".encode("utf-8", "backslashreplace"), digest_size=size)
    return int.from_bytes(digest.digest(), "big") or 1


def of_request(finding_id: str, trace_id: str) -> tuple[int, int]:
    """Return the trace and the span of ``whyspan.request``; *trace_id* is the request's own, if it is one."""
    return hex_id(trace_id, 16) or derived(finding_id, "trace", 16), derived(finding_id, "request", 8)
