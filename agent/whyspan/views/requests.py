"""The list of requests."""

from __future__ import annotations

from whyspan_exporters import schema
from whyspan_exporters.filters import Filter
from whyspan_exporters.listed import Listed
from whyspan_exporters.metrics.states import number
from whyspan_exporters.reader import Reader

from whyspan.views.shapes import MAX_FACETS, Facets, Page, Row


def row(found: Listed) -> Row:
    """Return a request as it is shown."""
    return Row(
        id=found.id,
        trace_id=found.trace_id,
        service=found.service,
        method=found.method,
        route=found.route,
        model=found.model,
        tenant=found.tenant,
        start_unix_ms=found.start_unix_ns / 1e6,
        latency_ms=found.latency_ns / 1e6,
        ttft_ms=found.ttft_ns / 1e6 if found.ttft_ns is not None else None,
        status=found.status,
        outcome=found.outcome,
        slow=bool(found.slow & schema.SLOW_BIT),
        failed=bool(found.slow & schema.FAILED_BIT),
        cause=found.cause,
        excess_ms=number(found.excess_ms) or 0.0,
        share=number(found.share) or 0.0,
        confidence=number(found.confidence) or 0.0,
        culprit_kind=found.culprit_kind,
        culprit=found.culprit,
        phase=found.phase,
    )


def page(  # noqa: PLR0917
    reader: Reader,
    wanted: Filter,
    sort: str = "start",
    order: str = "desc",
    limit: int = 100,
    cursor: str = "",
) -> Page:
    """Return a page of the list; for the arguments see `Listing.page`.

    Raises:
        QueryError: No such sort or order, or a wrong cursor.
        StoreError: The store cannot be read.
    """
    found = reader.requests.page(wanted, sort=sort, order=order, limit=limit, cursor=cursor)
    return Page(rows=[row(r) for r in found.rows], total=found.total, next=found.cursor)


def facets(reader: Reader, wanted: Filter) -> Facets:
    """Return what the list of *wanted* can be filtered by.

    Raises:
        StoreError: The store cannot be read.
    """
    found = reader.requests.facets(wanted, MAX_FACETS)
    return Facets(
        services=found["service"],
        causes=found["cause"],
        culprits=found["culprit"],
        tenants=found["tenant"],
        models=found["model"],
        routes=found["route"],
    )
