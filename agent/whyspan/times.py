"""Times as people write them: an age such as ``10m``, or a moment in RFC 3339."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from whyspan.errors import ConfigError

_UNITS_NS: Final = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
#: An age; also of the OpenAPI description.
AGE: Final = r"\d{1,9}(?:\.\d{1,9})?[smhd]"
#: RFC 3339, section 5.6; seconds may be left out, and a zone is UTC when it is.
MOMENT: Final = r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:[Zz]|[+-]\d{2}:\d{2})?"


def duration_ns(text: str) -> int:
    """Return ``90s``, ``10m``, ``2h`` or ``7d`` in ns.

    Raises:
        ConfigError: It is none of these.
    """
    text = text.strip()
    if re.fullmatch(AGE, text, re.ASCII) is None:
        raise ConfigError(f"{text!r} is not a duration such as 90s, 10m, 2h or 7d")
    return int(float(text[:-1]) * _UNITS_NS[text[-1]])


def moment_unix_ns(text: str, now_unix_ns: int) -> int:
    """Return the moment that *text* means, in ns since the Unix epoch: an age before *now_unix_ns*, or RFC 3339.

    Raises:
        ConfigError: It is neither.
    """
    text = text.strip()
    if re.fullmatch(AGE, text, re.ASCII):
        return max(now_unix_ns - duration_ns(text), 0)
    try:
        if re.fullmatch(MOMENT, text, re.ASCII) is None:
            raise ValueError
        found = datetime.fromisoformat(text.upper())
        if found.tzinfo is None:
            found = found.replace(tzinfo=UTC)
        passed = found - datetime(1970, 1, 1, tzinfo=UTC)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{text!r} is not a time such as 2026-01-02T03:04:05Z or an age such as 10m"
        ) from None
    return max((passed.days * 86400 + passed.seconds) * 10**9 + passed.microseconds * 1000, 0)
