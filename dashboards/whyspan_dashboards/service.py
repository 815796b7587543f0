"""Board 2, *One service*: status codes, models, phases, batch, queue, KV, interference, tenants."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from whyspan_dashboards import board, compare
from whyspan_dashboards import names as n
from whyspan_dashboards.panels import Look, Query, above, below, lines, number, rows, trace_lines

UID = "whyspan-service"
_S, _M = n.SERVICE, n.MODEL
_ENGINE = "whyspan_engine_name"
_TRACE = 'resource.service.name =~ "$service" && resource.host.name =~ "$host"'


def _latency(title: str, text: str, histogram: str) -> object:
    return lines(
        Look(title, text, "s", "service#latency-by-model"),
        Query(
            n.quantile(0.99, histogram, _M, "gen_ai_request_model"),
            "P99 {{gen_ai_request_model}}",
            exemplar=True,
        ),
        Query(n.quantile(0.5, histogram, _M, "gen_ai_request_model"), "P50 {{gen_ai_request_model}}"),
    )


def _requests() -> list[object]:
    success = f'{_S}, whyspan_slo_objective="success"'
    good = f'{success}, whyspan_slo_result="good"'
    return [
        lines(
            Look(
                "Requests by status",
                "0 with an outcome: no status was sent.",
                "reqps",
                "service#status-codes",
            ),
            Query(
                n.rate(n.REQUESTS, _S, "http_response_status_code, whyspan_outcome"),
                "{{http_response_status_code}} {{whyspan_outcome}}",
            ),
            stacked=True,
        ),
        number(
            Look(
                "Success rate",
                "Requests that neither failed nor were answered 5xx, over the time shown.",
                "percentunit",
                "service#status-codes",
                span=4,
                steps=below(0.99, 0.999),
                most=1,
            ),
            Query(f"{n.increase(n.SLO, good)} / {n.increase(n.SLO, success)}", "success"),
        ),
        number(
            Look(
                "In progress",
                "Requests open on the hosts chosen, all services.",
                "none",
                "service#queue",
                span=4,
            ),
            Query(f"sum({n.OPEN}{{{n.HOST}}})", "open"),
        ),
        lines(
            Look(
                "Inter-token jitter",
                "Standard deviation of inter-token time over its mean: 0 is even, 1 is as uneven as chance.",
                "none",
                "token-jitter",
                span=4,
            ),
            Query(f"max by (whyspan_service) ({n.JITTER}{{{_S}}})", "{{whyspan_service}}"),
        ),
        lines(
            Look(
                "Inter-token deviation",
                "Standard deviation of the time between tokens. Above 120 ms a reader sees it, and it alerts.",
                "s",
                "token-jitter",
                span=4,
                steps=((None, "green"), (n.STDDEV_S, "red")),
            ),
            Query(f"max by (whyspan_service) ({n.STDDEV}{{{_S}}})", "{{whyspan_service}}"),
        ),
        _latency("Duration by model", "All requests of the models chosen.", n.DURATION),
        _latency("Time to first token by model", "Until the first body byte.", n.TTFT),
        _latency("Time per output token by model", "Mean per request.", n.TPOT),
    ]


def _phases() -> list[object]:
    return [
        lines(
            Look("Time lost by phase", "Seconds lost per second, beyond the usual.", "s", "service#phases"),
            Query(n.rate(n.EXCESS, _S, "whyspan_phase"), "{{whyspan_phase}}", exemplar=True),
            stacked=True,
        ),
        lines(
            Look("Time lost by model", "Seconds lost per second, by model.", "s", "service#phases"),
            Query(n.rate(n.EXCESS, _M, "gen_ai_request_model"), "{{gen_ai_request_model}}"),
            stacked=True,
        ),
        trace_lines(
            Look(
                "Phase durations, P99",
                "Of explained requests: frontend, handover, queue, prefill, decode, delivery; from traces.",
                "s",
                "service#phases",
            ),
            f'{{ name =~ "whyspan.phase.*" && {_TRACE} }} | quantile_over_time(duration, 0.99) by (name)',
        ),
    ]


def _batch() -> list[object]:
    def per(counter: str, label: str) -> Query:
        return Query(n.rate(f"whyspan_engine_{counter}_total", _S), label)

    def ratio(counter: str, of: str) -> str:
        return f"{n.rate(f'whyspan_engine_{counter}_total', _S, _ENGINE)} / {n.rate(of, _S, _ENGINE)}"

    size = ratio("batch_sequences", "whyspan_engine_batch_count_total")
    step = ratio("step_time_seconds", "whyspan_engine_step_count_total")
    return [
        lines(
            Look(
                "Queue and batch",
                "Sequences that run, wait, or work for clients that left.",
                "none",
                "service#queue",
            ),
            Query(f"sum(whyspan_engine_sequence_running{{{_S}}})", "running"),
            Query(f"sum(whyspan_engine_sequence_waiting{{{_S}}})", "waiting"),
            Query(f"sum(whyspan_engine_sequence_zombie{{{_S}}})", "for nobody"),
        ),
        lines(
            Look("Batch size", "Sequences per step that had something to do.", "none", "service#batch"),
            Query(size, "{{whyspan_engine_name}}"),
        ),
        lines(Look("Step time", "Mean.", "s", "service#batch"), Query(step, "{{whyspan_engine_name}}")),
        lines(
            Look(
                "Tokens per second",
                "Scheduled, generated, found in the prefix cache.",
                "none",
                "service#batch",
            ),
            per("token_computed", "computed"),
            per("token_output", "generated"),
            per("token_cached", "cached"),
            per("token_recomputed", "recomputed"),
        ),
        lines(
            Look(
                "KV pool in use",
                "Red above 90%.",
                "percentunit",
                "kv-usage",
                most=1,
                steps=above(0.8, n.KV_FULL),
            ),
            Query(f"max by (host_name, {_ENGINE}) ({n.KV}{{{_S}}})", "{{host_name}} {{whyspan_engine_name}}"),
        ),
        lines(
            Look("Preemptions", "Sequences per second that lost their KV blocks.", "none", "kv#preemptions"),
            Query(n.rate("whyspan_engine_preemption_count_total", _S, _ENGINE), "{{whyspan_engine_name}}"),
        ),
        lines(
            Look(
                "Lost to other requests",
                "Seconds lost per second to what the engine did for others: prefill, costly neighbours, queueing ...",
                "s",
                "service#interference",
                span=16,
            ),
            Query(
                n.rate(n.EXCESS, f'{_S}, whyspan_cause=~"engine[.].*"', "whyspan_cause"), "{{whyspan_cause}}"
            ),
            stacked=True,
        ),
        lines(
            Look(
                "Prompts by template",
                "Of those tagged; other: not allowed, none: without.",
                "none",
                "service#tenants",
            ),
            Query(
                n.rate("whyspan_engine_prompt_count_total", _S, "whyspan_template"), "{{whyspan_template}}"
            ),
            stacked=True,
        ),
        trace_lines(
            Look(
                "Explained requests by tenant",
                "By x-tenant-id; from traces.",
                "reqps",
                "service#tenants",
                span=12,
            ),
            f'{{ name = "whyspan.request" && {_TRACE} }} | rate() by (span."http.request.header.x-tenant-id")',
        ),
        rows(
            Look(
                "Who, in this service",
                "Culprits by the time requests lost to them.",
                "s",
                "tail#top-culprits",
                span=12,
            ),
            Query(
                f"topk(20, {n.increase(n.CULPRIT, _S, 'whyspan_cause, whyspan_culprit_kind, whyspan_culprit_name')})"
            ),
            {
                "whyspan_cause": "Cause",
                "whyspan_culprit_kind": "Kind",
                "whyspan_culprit_name": "Culprit",
                "Value": "Time lost",
            },
        ),
    ]


def make() -> Dashboard:
    """Return the board."""
    return board.make(
        UID,
        "One service",
        "Everything whyspan knows of one service, and two versions of it side by side.",
        [
            board.choice(*board.HOST),
            board.choice(*board.SERVICE[:3], board.SERVICE[3], many=False),
            board.choice(*board.MODEL),
            *compare.variables(),
        ],
        [
            ("Requests", _requests()),
            ("Phases", _phases()),
            ("Batch, queue, KV, interference, tenants", _batch()),
            ("Two versions", compare.panels()),
        ],
    )
