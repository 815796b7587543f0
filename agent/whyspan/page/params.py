"""What may be asked: the parameters of each question, their bounds, and how they are read off a query.

A parameter that is not known, comes twice or is out of bounds is an error of one line, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, Meta, UnsetType
from whyspan_exporters.filters import Filter
from whyspan_exporters.listing import MAX_CURSOR, MAX_LIMIT

from whyspan import times
from whyspan.errors import ConfigError

Q = TypeVar("Q", bound="Query")

_MOMENT: Final = f"^(?:{times.AGE}|{times.MOMENT})?$"
#: The longest name that a filter takes; those in the store are cut off before.
_NAME: Final = 512
#: ms: 31 years. Beyond 2^53 ns a double is not exact.
_MOST_MS: Final = 1e12
_MAX_PAIRS: Final = 40
#: The longest id of a request, or name that can mean one.
LONGEST_ID: Final = 200

Name = Annotated[str, Meta(max_length=_NAME)]
Moment = Annotated[
    str,
    Meta(
        max_length=40,
        pattern=_MOMENT,
        description="RFC 3339, or an age such as 10m (s, m, h, d); empty: no limit",
        examples=["10m", "2026-01-02T03:04:05Z"],
    ),
]
Milliseconds = Annotated[float, Meta(ge=0, le=_MOST_MS)]
Cursor = Annotated[str, Meta(max_length=MAX_CURSOR)]
Sort = Literal[
    "start", "latency", "ttft", "excess", "share", "confidence",
    "status", "service", "route", "cause", "culprit", "phase",
]  # fmt: skip


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a question."""


class Span(Query, frozen=True):
    """A span of time."""

    since: Moment = ""
    until: Moment = ""


class Filters(Span, frozen=True):
    """Which requests. Empty: all. ``cause`` takes all below it too (``cpu`` takes ``cpu.throttled``).

    ``slow``: those that were slow or failed, or neither. ``failed``: those that failed, or not.
    """

    service: Name = ""
    cause: Name = ""
    culprit: Name = ""
    tenant: Name = ""
    model: Name = ""
    route: Name = ""
    outcome: Literal["", "ok", "error", "reset", "killed", "lost", "open"] = ""
    slow: bool | UnsetType = UNSET
    failed: bool | UnsetType = UNSET
    min_ms: Milliseconds = 0
    max_ms: Milliseconds = 0  # 0: none


class ListQuery(Filters, frozen=True):
    """A page of the list of requests."""

    sort: Sort = "start"
    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = 100
    cursor: Cursor = ""


class TailQuery(Span, frozen=True):
    """The distribution of latency. ``step`` is in seconds; 0 chooses one."""

    service: Name = ""
    step: Annotated[float, Meta(ge=0, le=86400)] = 0


def parse(kind: type[Q], query: str) -> Q:
    """Return what the query part of an address says.

    Raises:
        ConfigError: A parameter is unknown, given twice or wrong.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PAIRS, errors="strict")
    except ValueError as exc:  # UnicodeDecodeError is one
        raise ConfigError(f"the query cannot be read: {exc}") from None
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = value
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(str(exc).replace(" - at `$.", ": ").replace("`", "")) from None


def moments(query: Span, now_unix_ns: int) -> tuple[int, int]:
    """Return since when and until when, ns since the epoch; 0: no limit.

    Raises:
        ConfigError: One is no time.
    """
    since = times.moment_unix_ns(query.since, now_unix_ns) if query.since else 0
    return since, times.moment_unix_ns(query.until, now_unix_ns) if query.until else 0


def wanted(query: Filters, now_unix_ns: int) -> Filter:
    """Return the filter that *query* means.

    Raises:
        ConfigError: One of its times is none.
    """
    since, until = moments(query, now_unix_ns)
    failed = None if query.failed is UNSET else bool(query.failed)
    return Filter(
        service=query.service,
        cause=query.cause,
        culprit=query.culprit,
        tenant=query.tenant,
        model=query.model,
        route=query.route,
        outcome=query.outcome,
        ordinary=query.slow is not True,
        slow=False if query.slow is False else None,
        failed=False if query.slow is False else failed,
        since_unix_ns=since,
        until_unix_ns=until,
        min_ms=query.min_ms,
        max_ms=query.max_ms,
    )
