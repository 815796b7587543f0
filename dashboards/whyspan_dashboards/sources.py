"""Provisioning of Grafana: the data sources, their links to each other, and the folder of boards."""

from __future__ import annotations

from typing import Any, Final

from whyspan_dashboards import names as n

PROMETHEUS_UID: Final = "whyspan-prometheus"
TEMPO_UID: Final = "whyspan-tempo"
#: The label of an exemplar that holds the trace id, in OpenMetrics and as Prometheus takes it from OTLP.
TRACE_LABEL: Final = "trace_id"
#: A trace of a service is explained by metrics that name it; resource attribute -> label.
TAGS: Final = (
    {"key": "service.name", "value": "whyspan_service"},
    {"key": "host.name", "value": "host_name"},
)

#: What a span offers: name, and PromQL in which ``__tags`` stands for `TAGS` of the span.
TRACE_QUERIES: Final = (
    (
        "P99 of this service",
        f"histogram_quantile(0.99, sum by (le) (rate({n.DURATION}_bucket{{__tags}}[5m])))",
    ),
    (
        "P99 time to first token",
        f"histogram_quantile(0.99, sum by (le) (rate({n.TTFT}_bucket{{__tags}}[5m])))",
    ),
    ("Time lost by cause", f"sum by (whyspan_cause) (rate({n.EXCESS}{{__tags}}[5m]))"),
    ("Requests by outcome", f"sum by (whyspan_outcome) (rate({n.REQUESTS}{{__tags}}[5m]))"),
    ("KV pool in use", f"max by (host_name) ({n.KV}{{__tags}})"),
)


def datasources() -> dict[str, Any]:
    """Return ``provisioning/datasources/whyspan.yaml``; in it ``$$`` is a dollar sign."""
    prometheus = {
        "name": "whyspan Prometheus",
        "uid": PROMETHEUS_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": "${WHYSPAN_PROMETHEUS_URL}",
        "isDefault": True,
        "editable": False,
        "jsonData": {
            "httpMethod": "POST",
            "prometheusType": "Prometheus",
            # [otlp] metrics_interval_s, and how often Prometheus scrapes: what $__rate_interval is made from.
            "timeInterval": "60s",
            "exemplarTraceIdDestinations": [{"name": TRACE_LABEL, "datasourceUid": TEMPO_UID}],
        },
    }
    queries = [{"name": name, "query": query.replace("__tags", "$$__tags")} for name, query in TRACE_QUERIES]
    tempo = {
        "name": "whyspan Tempo",
        "uid": TEMPO_UID,
        "type": "tempo",
        "access": "proxy",
        "url": "${WHYSPAN_TEMPO_URL}",
        "editable": False,
        "jsonData": {
            "tracesToMetrics": {
                "datasourceUid": PROMETHEUS_UID,
                "spanStartTimeShift": "-10m",
                "spanEndTimeShift": "10m",
                "tags": [dict(tag) for tag in TAGS],
                "queries": queries,
            },
            "nodeGraph": {"enabled": True},
            "search": {"hide": False},
            "traceQuery": {"timeShiftEnabled": True, "spanStartTimeShift": "-30m", "spanEndTimeShift": "30m"},
            "spanBar": {"type": "Tag", "tag": "whyspan.excess_ms"},
        },
    }
    return {"apiVersion": 1, "prune": False, "datasources": [prometheus, tempo]}


def boards() -> dict[str, Any]:
    """Return ``provisioning/dashboards/whyspan.yaml``."""
    provider = {
        "name": "whyspan",
        "orgId": 1,
        "folder": "whyspan",
        "folderUid": "whyspan",
        "type": "file",
        "disableDeletion": False,
        "updateIntervalSeconds": 60,
        "allowUiUpdates": False,
        "options": {"path": "/var/lib/grafana/dashboards/whyspan", "foldersFromFilesStructure": False},
    }
    return {"apiVersion": 1, "providers": [provider]}
