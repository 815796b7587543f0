"""What the page asks, one function per path; what is shown is made by `whyspan.views`."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from whyspan_exporters.reader import Reader

from whyspan.page.params import Filters, ListQuery, Query, Span, TailQuery, moments, wanted
from whyspan.page.settings import Settings
from whyspan.text import clean
from whyspan.views import host, request, requests, shapes, tail


class NotFound(Exception):
    """There is no such thing in the store."""


class Asked(NamedTuple):
    """A question being answered."""

    reader: Reader
    settings: Settings
    query: Any
    name: str  # of what the path names
    now_unix_ns: int


class Question(NamedTuple):
    """A path: what it takes and gives, and who answers. ``names``: the parameter in it."""

    path: str
    summary: str
    query: type[Query]
    gives: type[msgspec.Struct]
    ask: Any
    names: str = ""


class Health(msgspec.Struct):
    """The store can be read. ``collector``: one has told of itself within the last 30 s."""

    collector: bool


def _health(asked: Asked) -> Health:
    return Health(bool(asked.reader.status()))


def _requests(asked: Asked) -> shapes.Page:
    q: ListQuery = asked.query
    return requests.page(asked.reader, wanted(q, asked.now_unix_ns), q.sort, q.order, q.limit, q.cursor)


def _facets(asked: Asked) -> shapes.Facets:
    return requests.facets(asked.reader, wanted(asked.query, asked.now_unix_ns))


def _request(asked: Asked) -> shapes.RequestView:
    s = asked.settings
    found = request.find(asked.reader, asked.name, trace_url=s.trace_url, runbook_url=s.runbook_url)
    if found is None:
        raise NotFound(f"there is no request {clean(asked.name, 80)} in the store; the oldest go first")
    return found


def _tail(asked: Asked) -> shapes.TailView:
    q: TailQuery = asked.query
    since, until = moments(q, asked.now_unix_ns)
    return tail.view(asked.reader, q.service, since, until, int(q.step * 1e9), asked.now_unix_ns)


def _host(asked: Asked) -> shapes.HostView:
    since, until = moments(asked.query, asked.now_unix_ns)
    return host.view(asked.reader, since, until, now_unix_ns=asked.now_unix_ns)


ALL: Final = (
    Question("/api/requests", "Requests, a page of the list", ListQuery, shapes.Page, _requests),
    Question(
        "/api/requests/{id}",
        "One request: what it did, and why it was slow",
        Query,
        shapes.RequestView,
        _request,
        "id",
    ),
    Question("/api/facets", "What the list can be filtered by", Filters, shapes.Facets, _facets),
    Question(
        "/api/tail", "The distribution of latency, its slow part by cause", TailQuery, shapes.TailView, _tail
    ),
    Question("/api/host", "The host: pressure, quotas, the agent's own cost", Span, shapes.HostView, _host),
    Question("/api/health", "Whether the store can be read", Query, Health, _health),
)
