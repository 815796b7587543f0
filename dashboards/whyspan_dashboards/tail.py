"""Board 1, *Why is the tail slow?*: from "P99 is up" to the cause and one trace."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from whyspan_dashboards import board, links
from whyspan_dashboards import names as n
from whyspan_dashboards.panels import Look, Query, above, bars, below, heat, lines, number, rows, traces

UID = "whyspan-tail"
_S = n.SERVICE
_KEPT = "whyspan_service, whyspan_slo_objective"
_GOOD = f'{_S}, whyspan_slo_result="good"'
_TITLE = "Why is the tail slow?"
_SLOW = (
    '{{ name = "whyspan.request" && resource.service.name =~ "$service" && resource.host.name =~ "$host" && {what} }}'
    " | select(span.whyspan.verdict, span.whyspan.sentence, span.whyspan.phase, span.http.response.status_code)"
)


def _objectives() -> list[object]:
    kept = f"{n.increase(n.SLO, _GOOD, _KEPT)} / {n.increase(n.SLO, _S, _KEPT)}"
    burn = f"(1 - {n.rate(n.SLO, _GOOD, _KEPT, '1h')} / {n.rate(n.SLO, _S, _KEPT, '1h')}) / {n.ERROR_BUDGET}"
    legend = "{{whyspan_service}} {{whyspan_slo_objective}}"
    return [
        number(
            Look(
                "Objectives kept",
                "Share of requests within each objective of [slo], over the time shown. Red below 99%.",
                "percentunit",
                "slo-burn",
                span=10,
                height=5,
                steps=below(0.99, 0.995),
                most=1,
                more=[links.TO_SERVICE],
            ),
            Query(kept, legend),
        ),
        number(
            Look(
                "Error budget burn, last hour",
                "How many times faster than allowed requests miss their objective (1% may). 14.4 eats 2% of a month's "
                "budget in an hour, which pages.",
                "none",
                "slo-burn",
                span=10,
                height=5,
                steps=above(n.BURN_TICKET, n.BURN_FAST),
                more=[links.TO_SERVICE],
            ),
            Query(burn, legend),
        ),
        number(
            Look(
                "Agents reporting",
                "Hosts whose collector reports now.",
                "none",
                "agent-down",
                span=4,
                height=5,
                steps=below(1, 1),
            ),
            Query(f"sum(max by (host_name, instance) ({n.UP}{{{n.HOST}}}))", "hosts"),
        ),
    ]


def _latency(title: str, text: str, histogram: str) -> object:
    look = Look(title, text, "s", "tail#how-slow", more=[links.TO_SERVICE])
    return lines(
        look,
        Query(n.quantile(0.99, histogram, _S, "whyspan_service"), "P99 {{whyspan_service}}", exemplar=True),
        Query(n.quantile(0.5, histogram, _S, "whyspan_service"), "P50 {{whyspan_service}}"),
    )


def _why() -> list[object]:
    by_cause = n.increase(n.EXCESS, _S, "whyspan_cause")
    culprit = "whyspan_service, whyspan_cause, whyspan_culprit_kind, whyspan_culprit_name"
    explained = n.increase(n.FINDINGS, f'{_S}, whyspan_cause!="none"')
    # Nobody was turned away: there is no such series, which is 0.
    refused = f"({n.increase(n.NOT_EXPLAINED, _S)} or vector(0))"
    return [
        lines(
            Look(
                "Time lost by cause",
                "Seconds that explained requests lost per second, beyond what they usually take, stacked by cause. A "
                "dot is a request: click it for its trace.",
                "s",
                "tail#time-lost-by-cause",
                span=16,
                height=10,
            ),
            Query(n.rate(n.EXCESS, _S, "whyspan_cause"), "{{whyspan_cause}}", exemplar=True),
            stacked=True,
        ),
        bars(
            Look(
                "Share of the tail",
                "Of all the time lost in the time shown, the part of each cause. One above 30% for ten minutes is "
                "an alert.",
                "percentunit",
                "one-cause",
                height=10,
                steps=above(0.15, n.CAUSE_SHARE),
                most=1,
            ),
            Query(
                f"sort_desc({by_cause} / ignoring (whyspan_cause) group_left sum({by_cause}))",
                "{{whyspan_cause}}",
            ),
        ),
        rows(
            Look(
                "Top culprits",
                "Who took the time: process, thread, lock, disk, request ..., by the time requests lost to it.",
                "s",
                "tail#top-culprits",
                span=16,
                more=[links.TO_SERVICE],
            ),
            Query(f"topk(20, {n.increase(n.CULPRIT, _S, culprit)})"),
            {
                "whyspan_service": "Service",
                "whyspan_cause": "Cause",
                "whyspan_culprit_kind": "Kind",
                "whyspan_culprit_name": "Culprit",
                "Value": "Time lost",
            },
        ),
        lines(
            Look(
                "Time lost by phase",
                "Where in the request the time was lost.",
                "s",
                "tail#time-lost-by-phase",
            ),
            Query(n.rate(n.EXCESS, _S, "whyspan_phase"), "{{whyspan_phase}}"),
            stacked=True,
        ),
        lines(
            Look(
                "Requests explained, by cause",
                "Slow and failed requests per second and their verdict.",
                "reqps",
                "tail#time-lost-by-cause",
                span=16,
            ),
            Query(n.rate(n.FINDINGS, f'{_S}, whyspan_cause!="none"', "whyspan_cause"), "{{whyspan_cause}}"),
            stacked=True,
        ),
        number(
            Look(
                "Slow requests that were explained",
                "The rest were over [collector] explain_per_s: the figures above are then of a sample.",
                "percentunit",
                "evidence-losses#not-explained",
                steps=below(0.5, 0.9),
                most=1,
            ),
            Query(f"{explained} / ({explained} + {refused})", "explained"),
        ),
    ]


def _examples() -> list[object]:
    return [
        heat(
            Look(
                "Request durations",
                "All requests. A dot is one that was explained.",
                "s",
                "tail#how-slow",
                span=24,
            ),
            Query(n.increase(n.DURATION + "_bucket", _S, "le", "$__rate_interval"), "{{le}}", exemplar=True),
        ),
        traces(
            Look(
                "Slow requests",
                "The newest slow requests; a click opens the trace.",
                "ms",
                "tail#one-trace",
                span=12,
            ),
            _SLOW.format(what="span.whyspan.slow = true"),
        ),
        traces(
            Look("Failed requests", "The newest requests that failed.", "ms", "tail#one-trace", span=12),
            _SLOW.format(what="span.error.type != nil"),
        ),
    ]


def make() -> Dashboard:
    """Return the board."""
    latency = [
        _latency(
            "Request duration", "From the first byte in to the last byte out, all requests.", n.DURATION
        ),
        _latency("Time to first token", "From the first byte in to the first body byte out.", n.TTFT),
        _latency("Time per output token", "Mean time between chunks of a stream, per request.", n.TPOT),
    ]
    return board.make(
        UID,
        _TITLE,
        "Start here when P99 is up: which objective, since when, lost to what, by whose doing, and one trace of it.",
        [board.choice(*board.HOST), board.choice(*board.SERVICE)],
        [
            ("Are we within our objectives?", _objectives()),
            ("How slow?", latency),
            ("Why?", _why()),
            ("Show me one", _examples()),
        ],
    )
