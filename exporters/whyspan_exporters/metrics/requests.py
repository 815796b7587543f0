"""Metrics of all requests, explained or not: counts, objectives, latencies, how even the tokens came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from whyspan_exporters.metrics.agent import of_collector
from whyspan_exporters.metrics.figures import Figures, label, number, table
from whyspan_exporters.metrics.instrument import (
    OTHER,
    OVERFLOW,
    SERVICE,
    Instrument,
    Labels,
    Point,
    Read,
    counter,
    gauge,
    updown,
)

_MODEL: Final = "gen_ai.request.model"
_ERROR: Final = "error.type"
_OUTCOME: Final = "whyspan.outcome"
_STATUS: Final = "http.response.status_code"
_RESULT: Final = "whyspan.slo.result"
_OBJECTIVE: Final = "whyspan.slo.objective"


def _split(name: str, first: str, second: str) -> Read:
    """Read what was counted under labels of two parts."""

    def read(figures: Figures) -> Iterator[Point]:
        for service, both, value in figures.totals(name):
            if (service, both) == OTHER:
                yield Point(value, {OVERFLOW: True})
            else:
                one, _, other = both.partition("/")
                yield Point(value, {SERVICE: service, first: one, second: other})

    return read


def _not_explained(figures: Figures) -> Iterator[Point]:
    for service, kind, value in figures.totals("not_explained"):
        if (service, kind) == OTHER:
            yield Point(value, {OVERFLOW: True})
        else:
            yield Point(value, {SERVICE: service, "whyspan.kind": kind or "slow"})


def _histogram(name: str) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        for series, buckets, exemplars in figures.histograms(name):
            labels: Labels = {SERVICE: series.service}
            if series.model:
                labels[_MODEL] = series.model
            if series.error:
                labels[_ERROR] = series.error
            yield Point(buckets, {OVERFLOW: True} if series.overflow else labels, exemplars)

    return read


def _even(field: str) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        found = table(figures.collector(), "inter_token")
        for service in found:
            if (value := number(table(found, service).get(field))) is not None:
                yield Point(value, {SERVICE: label(str(service))})

    return read


def _latency(name: str, description: str, read: str) -> Instrument:
    return Instrument("histogram", name, "s", description, (SERVICE, _MODEL, _ERROR), _histogram(read), False)


INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    counter(
        "whyspan.request.count",
        "{request}",
        "Requests that ended on the watched servers.",
        _split("request_codes", _OUTCOME, _STATUS),
        SERVICE,
        _OUTCOME,
        _STATUS,
    ),
    updown("whyspan.request.open", "{request}", "Requests in progress.", of_collector("open_requests")),
    counter(
        "whyspan.request.not_explained",
        "{request}",
        "Slow or failed requests over the limit of explanations per second.",
        _not_explained,
        SERVICE,
        "whyspan.kind",
    ),
    counter(
        "whyspan.slo.request.count",
        "{request}",
        "Requests by whether they met an objective of their service. Without GET, HEAD and OPTIONS, as those of "
        "health checks and scrapes. A request that failed before the limit of a latency counts for success alone.",
        _split("slo", _OBJECTIVE, _RESULT),
        SERVICE,
        _RESULT,
        _OBJECTIVE,
    ),
    _latency(
        "gen_ai.server.request.duration",
        "From a request's first byte at the server's socket to the last of its answer. All requests but GET, HEAD and "
        "OPTIONS.",
        "duration",
    ),
    _latency(
        "gen_ai.server.time_to_first_token",
        "To the first byte of the answer's body, which of an answer in one piece is all of it.",
        "ttft",
    ),
    _latency(
        "gen_ai.server.time_per_output_token",
        "Mean time between the chunks of a streamed answer after the first, one value per request.",
        "per_token",
    ),
    gauge(
        "whyspan.request.inter_token.stddev",
        "s",
        "Standard deviation of the time between tokens, in the answers of the last minute. Where no engine tells, it "
        "is that of answers' mean times between chunks, weighted by chunks: what changes within one is not in it.",
        _even("stddev_s"),
        SERVICE,
        whole=False,
    ),
    gauge(
        "whyspan.request.jitter",
        "1",
        "The same as a share of the mean.",
        _even("jitter"),
        SERVICE,
        whole=False,
    ),
)
