"""Makes strings that come from outside (process names, routes, header values) safe to show on a terminal."""

from __future__ import annotations

ELLIPSIS = "…"


def clean(text: str, limit: int = 200) -> str:
    """Return *text* on one line, without anything a terminal would obey, at most *limit* characters long.

    Control characters (C0, DEL, C1), line separators, bidirectional overrides, zero-width characters and lone
    surrogates become visible escapes such as ``\\x1b`` or ``\\u202e``. Idempotent.

    Args:
        text: Any string.
        limit: The greatest length of the result, ellipsis included; at least 1.
    """
    # No more than limit characters can survive; do not walk a megabyte to show a line.
    safe = "".join(c if c.isprintable() else _escape(c) for c in text[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + ELLIPSIS


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
