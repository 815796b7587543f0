"""Metrics as PromQL knows them, selectors of the boards' variables, and the figures that colours and alerts share."""

from __future__ import annotations

from typing import Final

# Names are those that Prometheus' OTLP translator makes of the metrics in `docs/metrics.md`: dots become underscores,
# units and `_total` are appended, a gauge of unit 1 gets `_ratio`.
REQUESTS: Final = "whyspan_request_count_total"
OPEN: Final = "whyspan_request_open"
SLO: Final = "whyspan_slo_request_count_total"
EXCESS: Final = "whyspan_cause_excess_time_seconds_total"
CULPRIT: Final = "whyspan_cause_culprit_time_seconds_total"
FINDINGS: Final = "whyspan_finding_count_total"
NOT_EXPLAINED: Final = "whyspan_request_not_explained_total"
DURATION: Final = "gen_ai_server_request_duration_seconds"
TTFT: Final = "gen_ai_server_time_to_first_token_seconds"
TPOT: Final = "gen_ai_server_time_per_output_token_seconds"
JITTER: Final = "whyspan_request_jitter_ratio"
STDDEV: Final = "whyspan_request_inter_token_stddev_seconds"
KV: Final = "whyspan_engine_kv_utilization_ratio"
FRAGMENTATION: Final = "whyspan_engine_kv_fragmentation_ratio"
GPU_FRAGMENTATION: Final = "whyspan_gpu_fragmentation_ratio"
GPU_MEMORY: Final = "hw_gpu_memory_utilization_ratio"
THROTTLED: Final = "whyspan_host_throttled_time_seconds_total"
UP: Final = "whyspan_collector_up_ratio"
BUILD: Final = "whyspan_build_info_ratio"
EVENTS: Final = "whyspan_event_count_total"
EVENTS_DROPPED: Final = "whyspan_event_dropped_total"
FINDINGS_DROPPED: Final = "whyspan_finding_dropped_total"
SPOOL_LOST: Final = "whyspan_spool_lost_total"
STORE_OK: Final = "whyspan_store_ok_ratio"

#: What the boards' variables choose. ``All`` is ``.*``, which also takes series without the label.
HOST: Final = 'host_name=~"$host"'
SERVICE: Final = f'{HOST}, whyspan_service=~"$service"'
MODEL: Final = f'{SERVICE}, gen_ai_request_model=~"$model"'

#: Share of requests that an objective allows to miss it: 1%, the counterpart of an objective at P99.
ERROR_BUDGET: Final = 0.01
# Burn rates of two windows: https://sre.google/workbook/alerting-on-slos/, table 5-8 (2% of a 30-day budget in one
# hour, 5% in six, 10% in three days).
BURN_FAST: Final = 14.4
BURN_SLOW: Final = 6.0
BURN_TICKET: Final = 1.0
CAUSE_SHARE: Final = 0.30
#: A tail is worth an alert when it is at least so much of all the time that requests took.
TAIL_SHARE: Final = 0.01
KV_FULL: Final = 0.90
FRAGMENTED: Final = 0.35
GPU_MEMORY_FULL: Final = 0.90
STDDEV_S: Final = 0.120
#: Seconds throttled per second.
THROTTLED_SHARE: Final = 0.05
#: Of kernel events, those that found their ring full.
EVENTS_LOST_SHARE: Final = 0.001
# A version is worse: P99 in s, errors as a share of requests.
P99_WORSE_S: Final = 0.015
ERRORS_WORSE: Final = 0.008


def quantile(q: float, histogram: str, selector: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Return the PromQL of a quantile of *histogram*, by the labels *by* (``a, b``)."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({histogram}_bucket{{{selector}}}[{window}])))"


def rate(counter: str, selector: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Return the PromQL of a counter's rate per second, summed up *by* labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{selector}}}[{window}]))"


def increase(counter: str, selector: str, by: str = "", window: str = "$__range") -> str:
    """Return the PromQL of what a counter grew by, summed up *by* labels."""
    return f"sum{f' by ({by})' if by else ''} (increase({counter}{{{selector}}}[{window}]))"
