"""Board 5, *The agent itself*: is it up, what does it cost, what does it lose."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from whyspan_dashboards import board, links
from whyspan_dashboards import names as n
from whyspan_dashboards.panels import Look, Query, above, below, lines, number, rows

UID = "whyspan-agent"
_H = n.HOST
_HOST = "host_name"


def _state() -> list[object]:
    probe = "host_name, whyspan_probe, whyspan_state"
    return [
        number(
            Look(
                "Reporting",
                "1 while the collector reports.",
                "none",
                "agent-down",
                span=6,
                steps=below(1, 1),
                more=[links.TO_HOST],
            ),
            Query(f"max by ({_HOST}) ({n.UP}{{{_H}}})", "{{host_name}}"),
        ),
        number(
            Look(
                "Store",
                "1 while it can be written.",
                "none",
                "evidence-losses#store",
                span=6,
                steps=below(1, 1),
            ),
            Query(f"min by ({_HOST}) ({n.STORE_OK}{{{_H}}})", "{{host_name}}"),
        ),
        rows(
            Look("Versions", "whyspan and the kernel under it.", "none", "agent#versions", span=12),
            Query(f"max by (host_name, service_version, whyspan_kernel) ({n.BUILD}{{{_H}}})"),
            {
                "host_name": "Host",
                "service_version": "whyspan",
                "whyspan_kernel": "Kernel",
                "Value": "Running",
            },
        ),
        rows(
            Look(
                "Probes",
                "What each is doing; `whyspan doctor` on the host says why.",
                "none",
                "agent#probes",
                span=12,
            ),
            Query(f"max by ({probe}) (whyspan_probe_state_ratio{{{_H}}})"),
            {"host_name": "Host", "whyspan_probe": "Probe", "whyspan_state": "State", "Value": "Is"},
        ),
        lines(
            Look("Watched", "Processes.", "none", "agent#watched", span=12),
            Query(f"sum by (whyspan_service) (whyspan_target_count{{{n.SERVICE}}})", "{{whyspan_service}}"),
        ),
    ]


def _cost() -> list[object]:
    cpu = n.rate("whyspan_process_cpu_time_seconds_total", _H, "host_name, whyspan_process")
    return [
        lines(
            Look(
                "CPU of the agent",
                "Cores, by process.",
                "none",
                "agent#cost",
                steps=above(0.1, 0.5),
            ),
            Query(cpu, "{{host_name}} {{whyspan_process}}"),
        ),
        lines(
            Look("CPU of the probes", "Cores, in the kernel.", "none", "agent#cost", steps=above(0.02, 0.1)),
            Query(
                f"sum by (host_name, whyspan_probe) (whyspan_probe_cpu_utilization_ratio{{{_H}}})",
                "{{host_name}} {{whyspan_probe}}",
            ),
            stacked=True,
        ),
        lines(
            Look("Memory", "Resident, by process.", "bytes", "agent#cost"),
            Query(
                f"sum by (host_name, whyspan_process) (whyspan_process_memory_usage_bytes{{{_H}}})",
                "{{host_name}} {{whyspan_process}}",
            ),
        ),
        lines(
            Look("Hits", "How often programs of each probe run.", "cps", "agent#cost"),
            Query(f"sum by (whyspan_probe) (whyspan_probe_hit_rate_per_second{{{_H}}})", "{{whyspan_probe}}"),
        ),
        lines(
            Look("Time per hit", "Mean.", "s", "agent#cost"),
            Query(f"max by (whyspan_probe) (whyspan_probe_hit_time_seconds{{{_H}}})", "{{whyspan_probe}}"),
        ),
        lines(
            Look(
                "Cost to the server",
                "CPU of agent and probes over the CPU that watched processes use.",
                "percentunit",
                "agent#cost",
                steps=above(0.01, 0.03),
            ),
            Query(
                f"(sum by (host_name) ({cpu}) + sum by (host_name) (whyspan_probe_cpu_utilization_ratio{{{_H}}}))"
                f" / sum by (host_name) (whyspan_target_cpu_usage{{{_H}}})",
                "{{host_name}}",
            ),
        ),
    ]


def _losses() -> list[object]:
    dropped = n.rate(n.EVENTS_DROPPED, _H, "host_name, whyspan_probe")
    events = n.rate(n.EVENTS, _H, "host_name, whyspan_probe")
    overflow = '{__name__=~"(whyspan|gen_ai)_.+", otel_metric_overflow="true", ' + _H + "}"
    return [
        lines(
            Look("Events", "Kernel events per second.", "eps", "agent#events"),
            Query(n.rate(n.EVENTS, _H, "whyspan_probe"), "{{whyspan_probe}}"),
            stacked=True,
        ),
        lines(
            Look(
                "Events lost",
                "Share that found their ring full. Above 0.1% alerts.",
                "percentunit",
                "evidence-losses#events",
                steps=above(0.0001, n.EVENTS_LOST_SHARE),
            ),
            # A ring that nobody writes to loses nothing: no 0/0.
            Query(f"{dropped} / ({events} + {dropped} > 0)", "{{host_name}} {{whyspan_probe}}"),
        ),
        lines(
            Look("Runs skipped", "By the kernel, per second.", "cps", "evidence-losses#events"),
            Query(n.rate("whyspan_probe_missed_total", _H, "whyspan_probe"), "{{whyspan_probe}}"),
        ),
        lines(
            Look(
                "Findings waiting", "In the collector, for the exporter.", "none", "evidence-losses#findings"
            ),
            Query(f"sum by (host_name) (whyspan_finding_queued{{{_H}}})", "{{host_name}}"),
        ),
        lines(
            Look(
                "Findings lost",
                "Per second, at the bound of a queue.",
                "cps",
                "evidence-losses#findings",
                steps=((None, "green"), (1e-9, "red")),
            ),
            Query(
                n.rate(n.FINDINGS_DROPPED, _H, "host_name, whyspan_queue"), "{{host_name}} {{whyspan_queue}}"
            ),
        ),
        lines(
            Look("Series in overflow", "Metrics at their bound of label values.", "none", "agent#overflow"),
            Query(f"count({overflow}) or vector(0)", "series"),
        ),
    ]


def _delivery() -> list[object]:
    return [
        lines(
            Look("Spans", "Per second, by what became of them.", "cps", "delivery#spans"),
            Query(n.rate("whyspan_span_count_total", _H, "whyspan_result"), "{{whyspan_result}}"),
        ),
        lines(
            Look("Spool", "Bytes on disk that wait to be sent.", "bytes", "delivery#spool"),
            Query(f"sum by (host_name) (whyspan_spool_size_bytes{{{_H}}})", "{{host_name}}"),
        ),
        lines(
            Look("Batches in the spool", "Batches.", "none", "delivery#spool"),
            Query(f"sum by (host_name) (whyspan_spool_items{{{_H}}})", "{{host_name}}"),
        ),
        lines(
            Look(
                "Oldest in the spool",
                "Age. It grows while the OTLP endpoint is away.",
                "s",
                "delivery#spool",
                steps=above(60, 600),
            ),
            Query(f"max by (host_name) (whyspan_spool_oldest_seconds{{{_H}}})", "{{host_name}}"),
        ),
        lines(
            Look(
                "Lost at the spool's bound",
                "Spans (or metric points) per second.",
                "cps",
                "evidence-losses#spool",
                steps=((None, "green"), (1e-9, "red")),
            ),
            Query(n.rate(n.SPOOL_LOST, _H, "host_name, whyspan_signal"), "{{host_name}} {{whyspan_signal}}"),
        ),
        lines(
            Look("Local store", "Bytes.", "bytes", "agent#store"),
            Query(f"sum by (host_name) (whyspan_store_size_bytes{{{_H}}})", "{{host_name}}"),
        ),
    ]


def make() -> Dashboard:
    """Return the board."""
    return board.make(
        UID,
        "The agent itself",
        "Whether to believe the other boards: is the agent up, what does it cost, what does it lose.",
        [board.choice(*board.HOST), board.choice(*board.SERVICE)],
        [("State", _state()), ("Cost", _cost()), ("Losses", _losses()), ("Delivery", _delivery())],
        traces=False,
    )
