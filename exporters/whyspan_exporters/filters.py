"""Which requests are meant, as a condition in SQL on the table ``requests``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from whyspan.errors import QueryError

from whyspan_exporters import listed, schema

LAST: Final = "\U0010ffff"  # sorts behind every text that goes on


@dataclass(frozen=True, slots=True)
class Filter:
    """Which requests; an empty text, None or 0 does not matter.

    ``cause`` takes every cause below it too (``cpu``: ``cpu.throttled``). ``ordinary``: also those neither slow nor
    failed. ``slow`` and ``failed``: only those that are, or are not. ``since_unix_ns`` is included, ``until_unix_ns``
    is not; nor is ``max_ms`` of the latency, 0 for none.
    """

    service: str = ""
    cause: str = ""
    culprit: str = ""
    tenant: str = ""
    model: str = ""
    route: str = ""
    outcome: str = ""
    ordinary: bool = False
    slow: bool | None = None
    failed: bool | None = None
    since_unix_ns: int = 0
    until_unix_ns: int = 0
    min_ms: float = 0.0
    max_ms: float = 0.0

    def where(self) -> tuple[str, list[object]]:
        """Return the condition in SQL, with its values.

        Raises:
            QueryError: A value is not text.
        """
        terms, values = ["start_unix_ns >= ?"], list[object]([listed.int64(self.since_unix_ns)])
        if self.until_unix_ns:
            terms.append("start_unix_ns < ?")
            values.append(listed.int64(self.until_unix_ns))
        if not self.ordinary:
            terms.append("slow > 0")
        for wanted, bit in ((self.slow, schema.SLOW_BIT), (self.failed, schema.FAILED_BIT)):
            if wanted is not None:
                terms.append(f"slow & {bit} {'>' if wanted else '='} 0")
        for name in ("service", "culprit", "tenant", "model", "route", "outcome"):
            if value := getattr(self, name):
                terms.append(f"{name} = ?")
                values.append(value)
        if self.cause:
            terms.append("(cause = ? OR (cause >= ? AND cause < ?))")
            values += [self.cause, f"{self.cause}.", f"{self.cause}.{LAST}"]
        for limit, sign in ((self.min_ms, ">="), (self.max_ms, "<")):
            if limit:
                terms.append(f"latency_ns {sign} ?")
                values.append(listed.int64(int(limit * 1e6)))
        if not all(listed.is_text(value) for value in values if isinstance(value, str)):
            raise QueryError("a condition is not text: half a character is in it")
        return " AND ".join(terms), values
