"""Two versions side by side: a label tells them apart, or time does (before and after a deployment)."""

from __future__ import annotations

from whyspan_dashboards import board
from whyspan_dashboards import names as n
from whyspan_dashboards.panels import Look, Query, lines, number

_ALL = f'{n.HOST}, gen_ai_request_model=~"$model"'
_NEW = f'{_ALL}, ${{version_label}}=~"$candidate"'
_OLD = f'{_ALL}, ${{version_label}}=~"$baseline"'
_COUNT = f"{n.DURATION}_count"


def variables() -> list[object]:
    """Return the variables that say which two."""
    values = f"label_values({_COUNT}, ${{version_label}})"
    return [
        board.picked(
            "version_label",
            "Versions differ by",
            ["whyspan_service", "gen_ai_request_model", "host_name", "instance", "version"],
            "The label that tells versions apart; `version` is whatever your scrape or collector adds.",
        ),
        board.choice("baseline", "Baseline", values, "The version to compare with.", many=False),
        board.picked(
            "baseline_offset",
            "Baseline was",
            ["now : 1s", "an hour ago : 1h", "a day ago : 1d", "a week ago : 7d"],
            "How long ago the baseline is looked at: the same value of both and 1d is before and after.",
        ),
        board.choice("candidate", "Candidate", values, "The version that is judged.", many=False),
    ]


def _p99(selector: str, window: str, back: str = "") -> str:
    return f"histogram_quantile(0.99, sum by (le) (rate({n.DURATION}_bucket{{{selector}}}[{window}]{back})))"


def _errors(selector: str, window: str, back: str = "") -> str:
    failed = f'sum(rate({_COUNT}{{{selector}, error_type!=""}}[{window}]{back}))'
    # Nothing failed: there is no such series, which is 0.
    return f"(({failed} or vector(0)) / sum(rate({_COUNT}{{{selector}}}[{window}]{back})))"


def panels() -> list[object]:
    """Return the two verdicts and the curves behind them."""
    span, back = "$__range", " offset $baseline_offset"
    p99 = f"{_p99(_NEW, span)} - {_p99(_OLD, span, back)}"
    errors = f"{_errors(_NEW, span)} - {_errors(_OLD, span, back)}"
    recent = "$__rate_interval"
    return [
        number(
            Look(
                "P99, candidate less baseline",
                "Over the time shown. Red above 15 ms.",
                "s",
                "compare",
                span=6,
                least=None,
                steps=((None, "green"), (n.P99_WORSE_S, "red")),
            ),
            Query(p99, "P99"),
        ),
        number(
            Look(
                "Errors, candidate less baseline",
                "Share of requests that failed, over the time shown. Red above 0.8 points.",
                "percentunit",
                "compare",
                span=6,
                least=None,
                steps=((None, "green"), (n.ERRORS_WORSE, "red")),
            ),
            Query(errors, "errors"),
        ),
        lines(
            Look("P99 of both", "The baseline without its offset.", "s", "compare", span=6),
            Query(_p99(_NEW, recent), "candidate $candidate", exemplar=True),
            Query(_p99(_OLD, recent), "baseline $baseline"),
        ),
        lines(
            Look("Errors of both", "Share of requests.", "percentunit", "compare", span=6),
            Query(_errors(_NEW, recent), "candidate $candidate"),
            Query(_errors(_OLD, recent), "baseline $baseline"),
        ),
    ]
